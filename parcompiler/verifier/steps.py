"""An index of the instructions of all ranks, in training or evaluation, by position.

The other rules use it, at the cost of a look-up per instruction. Malformed instructions are
reported and left out, so that no other rule meets a stage or rank that does not exist.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from parcompiler.instruction import (
    BEHIND,
    COMPUTE,
    EMBEDDING,
    GROUP,
    HEAD,
    MESSAGES,
    SHARDING,
    STAGED,
    Instruction,
    Kind,
)
from parcompiler.lower.lowered import Lowered
from parcompiler.verifier.fault import Fault
from parcompiler.verifier.wiring import Wiring

FORM = "every instruction fits its rank"
UPDATED = "parameters change only where they may"
ONCE = "every instruction stands once"
ORDERED = "nothing is used before it is there"

VOCABULARY = EMBEDDING | HEAD | GROUP
BACK = COMPUTE - {Kind.FORWARD}  # a backward, or a part of one

Places = dict[int, int]  # micro-batch -> position in the rank's list
Way = tuple[int, int, str, bool]  # source rank, target rank, value, whether its gradient
Label = tuple[str, bool, int]  # value, whether its gradient, micro-batch


class Phase(NamedTuple):
    """An instruction that every rank has for the vocabulary, of any micro-batch."""

    kind: Kind
    value: str = ""
    gradient: bool = False

    def __str__(self) -> str:
        """The first words of the instruction."""
        return f"{self.kind} {named(self.value, self.gradient)}".rstrip()


def named(value: str, gradient: bool) -> str:
    """A value or its gradient as instructions name them."""
    return f"{value}.grad" if gradient else value


class Pair(NamedTuple):
    """On `rank`, the instruction at `first[i]` must precede the one at `then[i]`."""

    rank: int
    first: Mapping[int, int]
    then: Mapping[int, int]
    rule: str = ORDERED


@dataclass(slots=True)
class ChannelEnd:
    """One end of a channel: its messages in order, and their positions in the rank's list."""

    labels: list[Label] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def common(self, other: ChannelEnd) -> list[int]:
        """The numbers of the messages that the other end has too."""
        if self.labels == other.labels:
            return list(range(len(self.labels)))
        balance = Counter(other.labels)
        balance.subtract(self.labels)  # below zero: surplus messages of this end
        kept = []
        for number in reversed(range(len(self.labels))):
            label = self.labels[number]
            if balance[label] < 0:
                balance[label] += 1
            else:
                kept.append(number)
        return kept[::-1]


@dataclass(slots=True)
class Channel:
    """All messages from one rank to another; they are matched by order only."""

    sends: ChannelEnd = field(default_factory=ChannelEnd)
    receives: ChannelEnd = field(default_factory=ChannelEnd)


class Malformed(NamedTuple):
    """A malformed instruction's problem, and the rule that it breaks."""

    rule: str
    problem: str


class LinePlace(NamedTuple):
    """Where instructions of one form are recorded: positions by micro-batch (or under the key
    `by`), labels of messages, and positions in order."""

    places: dict[Any, int] | None = None
    by: int | str | None = None
    labels: list[Label] | None = None
    positions: list[int] | None = None


class StepIndex:
    """The positions of all well-formed instructions."""

    def __init__(
        self, wiring: Wiring, lists: Sequence[Sequence[Instruction]], training: bool
    ) -> None:
        self.wiring = wiring
        self.lists = lists
        self.training = training
        self.asynchronous = training and wiring.lowered.asynchronous
        self.microbatches = range(wiring.lowered.microbatches)
        self.computed: dict[tuple[Kind, int], Places] = defaultdict(dict)
        self.sent: dict[Way, Places] = defaultdict(dict)
        self.received: dict[Way, Places] = defaultdict(dict)
        self.channels: dict[tuple[int, int], Channel] = defaultdict(Channel)
        self.parts: list[dict[Phase, Places]] = [{} for _ in lists]  # of each rank
        self.reductions: list[dict[str, int]] = [{} for _ in lists]  # of each rank, by label
        self.scatters: list[dict[str, Places]] = [{} for _ in lists]  # those with a micro-batch
        self.gathers: list[dict[str, int]] = [{} for _ in lists]
        self._shares: Places = {}
        self.sharding: dict[int, list[int]] = defaultdict(list)  # UNSHARD and RESHARD of a stage
        self.faults: list[Fault] = []
        self._repeated: Counter[tuple[int, Instruction]] = Counter()
        for rank, lines in enumerate(lists):
            self._read(rank, lines)
        self.shares = [self._shares.get(rank) for rank in range(len(lists))]
        for (rank, line), more in self._repeated.items():
            self.faults.append(Fault(ONCE, f"rank {rank}: {line} stands {more + 1} times"))
        stages = range(len(wiring.stages))
        self.back = [self._either(Kind.BACKWARD_INPUT, j) for j in stages]
        self.done = [self._either(Kind.BACKWARD_WEIGHT, j) for j in stages]

    def at(self, rank: int, position: int) -> Instruction:
        """The instruction at a position."""
        return self.lists[rank][position]

    def places(self, rank: int, part: Phase) -> Places:
        """The positions of a phase of the vocabulary on a rank."""
        return self.parts[rank].get(part, {})

    def _read(self, rank: int, lines: Iterable[Instruction]) -> None:
        """Record the instructions of a rank. Those that differ only in their micro-batch share a
        record, or a fault."""
        forms: dict[tuple[object, ...], LinePlace | Malformed] = {}
        for position, line in enumerate(lines):
            i = line.microbatch
            repeats = None if i is None else i in self.microbatches
            key = (line.kind, line.stage, line.value, line.gradient, line.peer, line.ranks, repeats)
            form = forms.get(key)
            if form is None:
                form = forms[key] = self._malformed(rank, line) or self._place(rank, line)
            if isinstance(form, Malformed):
                fault = Fault(form.rule, f"rank {rank}: {line}: {form.problem}")
                self.faults.append(fault)
                continue
            places, by, labels, positions = form
            if labels is not None:
                labels.append((line.value or "", line.gradient, i or 0))
            if positions is not None:
                positions.append(position)
            if places is not None:
                index = i if by is None else by
                if index in places:
                    self._repeated[rank, line] += 1
                else:
                    places[index] = position

    def _malformed(self, rank: int, line: Instruction) -> Malformed | None:
        """The problem of an instruction by itself, apart from its micro-batch."""
        if line.kind is Kind.UPDATE and not self.asynchronous:
            after = "they change after the step, which is synchronous"
            return Malformed(UPDATED, after if self.training else "an evaluation changes none")
        problem = next(self._problems(rank, line), None)
        return None if problem is None else Malformed(FORM, problem)

    def _either(self, part: Kind, j: int) -> Places:
        """The positions of stage `j`'s backwards (BACKWARD, or the given part of one) by
        micro-batch; of its forwards if it has no backward."""
        if j not in self.wiring.trained:
            return self.computed[Kind.FORWARD, j]
        return {**self.computed[part, j], **self.computed[Kind.BACKWARD, j]}

    def _problems(self, rank: int, line: Instruction) -> Iterator[str]:
        """The problems of an instruction by itself."""
        kind, i, j, lowered = line.kind, line.microbatch, line.stage, self.wiring.lowered
        stages, ranks, once = self.wiring.stages, range(len(self.lists)), False
        if kind in STAGED:
            if j is None or not 0 <= j < len(stages):
                yield f"there is no such stage (stages: {_span(len(stages))})"
            elif stages[j].rank != rank:
                yield f"stage {j} is on rank {stages[j].rank}"
            if kind in SHARDING and lowered.zero < 3:
                yield "every data rank has whole parameters"
            if kind is Kind.UNSHARD and line.ranks != (rank,):
                yield "its parameters come from the data replicas of its own rank"
            if kind in BACK and not self.training:
                yield "there is nothing to go back through"
            if kind in BACK and self.asynchronous and kind is not Kind.BACKWARD:
                yield "an asynchronous step has whole backwards, each with its UPDATE"
        elif kind in MESSAGES:
            if line.value is None:
                yield "it names no value"
            if line.peer == rank or line.peer not in ranks:
                yield f"its peer must be another rank (ranks: {_span(len(ranks))})"
        elif kind in VOCABULARY:
            if self.wiring.spread is None:
                yield "no layer of the vocabulary is on all ranks"
            if line.value is None and kind not in HEAD:
                yield "it names no value"
            backward = line.gradient or kind in (Kind.T, Kind.EMBED_BACKWARD)
            if backward and not self.training:
                yield "there are no gradients"
        elif kind is Kind.REDUCE_GRADIENTS:
            once = i is None  # after the step
            if line.value is None:
                yield "it names no tied tensor"
            if not self.training:
                yield "there are no gradients"
            if rank not in line.ranks:
                yield "it leaves out its own rank"
            if not once and lowered.zero < 2:
                yield "no data rank keeps a piece of its gradients"
        elif kind in BEHIND:
            once = True
            if line.value is None:
                yield "it names no tensors"
            if not self.training or kind is not behind(lowered):
                yield "no data rank updates what others need"
        elif kind is Kind.SHARE_LOSS:
            once = True
        else:
            yield "no rule is known for it"
        if not once and (i is None or i not in self.microbatches):
            count = len(self.microbatches)
            yield f"there is no such micro-batch (micro-batches: {_span(count)})"

    def _place(self, rank: int, line: Instruction) -> LinePlace:
        """The record for instructions of this form, made for the first one."""
        kind, j, name = line.kind, line.stage or 0, line.value or ""
        if kind in SHARDING:
            return LinePlace(positions=self.sharding[j])
        if kind in STAGED:
            return LinePlace(self.computed[kind, j])
        if kind in MESSAGES:
            assert line.peer is not None
            sends = kind is Kind.SEND
            way = (rank, line.peer) if sends else (line.peer, rank)
            places = (self.sent if sends else self.received)[*way, name, line.gradient]
            channel = self.channels[way]
            end = channel.sends if sends else channel.receives
            return LinePlace(places, None, end.labels, end.positions)
        if kind in VOCABULARY:
            return LinePlace(self.parts[rank].setdefault(Phase(kind, name, line.gradient), {}))
        if kind is Kind.REDUCE_GRADIENTS and line.microbatch is not None:
            return LinePlace(self.scatters[rank].setdefault(name, {}))
        if kind is Kind.SHARE_LOSS:
            return LinePlace(self._shares, rank)
        return LinePlace((self.gathers if kind in BEHIND else self.reductions)[rank], name)


def behind(lowered: Lowered) -> Kind | None:
    """The instruction by which data ranks get the updates of others after the step."""
    if lowered.updates.separate:
        return Kind.AVERAGE_PARAMETERS if lowered.updates.way == "local" else Kind.PUSH_PULL
    shares = lowered.zero or lowered.updates.way == "parameter-server"
    return Kind.GATHER_PARAMETERS if shares and not lowered.asynchronous else None


def _span(count: int) -> str:
    """The numbers below `count`.

    >>> _span(1), _span(4)
    ('only 0', '0 to 3')
    """
    return "only 0" if count == 1 else f"0 to {count - 1}"
