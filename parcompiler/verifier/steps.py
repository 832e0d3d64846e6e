"""An index of the instructions of all ranks, in training or evaluation: where each one stands.

The other rules ask here, so that each costs a look-up per instruction. What is not well formed is
reported and left out, and so no other rule meets a stage or rank that does not exist.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from parcompiler.instruction import EMBEDDING, HEAD, TRANSFERS, Instruction, Kind
from parcompiler.lower.lowered import Lowered
from parcompiler.verifier.fault import Fault
from parcompiler.verifier.wiring import Wiring

FORM = "every instruction fits its rank"
UPDATED = "parameters change only where they may"
ONCE = "every instruction stands once"
ORDERED = "nothing is used before it is there"

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
        return f"{self.kind} {self.value}{'.grad' if self.gradient else ''}".rstrip()


class Pair(NamedTuple):
    """On `rank`, what stands at `first[i]` must stand before what stands at `then[i]`."""

    rank: int
    first: Mapping[int, int]
    then: Mapping[int, int]
    rule: str = ORDERED


@dataclass(slots=True)
class ChannelEnd:
    """One end of a channel: its messages in order, and where each stands in the rank's list."""

    labels: list[Label] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def common(self, other: ChannelEnd) -> list[int]:
        """The numbers of the messages that the other end has too."""
        if self.labels == other.labels:
            return list(range(len(self.labels)))
        balance = Counter(other.labels)
        balance.subtract(self.labels)  # below zero: how many of ours are too many
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
    """All messages from one rank to another; they are matched by their order alone."""

    sends: ChannelEnd = field(default_factory=ChannelEnd)
    receives: ChannelEnd = field(default_factory=ChannelEnd)


class StepIndex:
    """Where everything stands that is well formed."""

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
        self.scatters: list[dict[str, Places]] = [{} for _ in lists]  # those of a micro-batch
        self.gathers: list[dict[str, int]] = [{} for _ in lists]
        self.shares: list[int | None] = [None for _ in lists]
        self.sharding: dict[int, list[int]] = defaultdict(list)  # UNSHARD and RESHARD of a stage
        self.faults: list[Fault] = []
        self._repeated: Counter[tuple[int, Instruction]] = Counter()
        for rank, lines in enumerate(lists):
            self._read(rank, lines)
        for (rank, line), more in self._repeated.items():
            self.faults.append(Fault(ONCE, f"rank {rank}: {line} stands {more + 1} times"))
        stages = range(len(wiring.stages))
        self.back = [self._either(Kind.BACKWARD_INPUT, j) for j in stages]
        self.done = [self._either(Kind.BACKWARD_WEIGHT, j) for j in stages]

    def at(self, rank: int, position: int) -> Instruction:
        """An instruction by where it stands."""
        return self.lists[rank][position]

    def places(self, rank: int, part: Phase) -> Places:
        """Where a rank has a line for the vocabulary."""
        return self.parts[rank].get(part, {})

    def _read(self, rank: int, lines: Iterable[Instruction]) -> None:
        """Sort the instructions of a rank."""
        verbs = {
            Kind.FORWARD: self._compute,
            Kind.BACKWARD: self._compute,
            Kind.BACKWARD_INPUT: self._compute,
            Kind.BACKWARD_WEIGHT: self._compute,
            Kind.UPDATE: self._update,
            Kind.SEND: self._message,
            Kind.RECV: self._message,
            Kind.REDUCE_GRADIENTS: self._reduction,
            Kind.SHARE_LOSS: self._share,
            Kind.GATHER_PARAMETERS: self._gather,
            Kind.AVERAGE_PARAMETERS: self._gather,
            Kind.PUSH_PULL: self._gather,
            Kind.UNSHARD: self._shard,
            Kind.RESHARD: self._shard,
            **dict.fromkeys((*EMBEDDING, *HEAD, *TRANSFERS, Kind.EXCHANGE), self._part),
        }
        for position, line in enumerate(lines):
            verb = verbs.get(line.kind)
            problem = verb(rank, position, line) if verb else "no rule is known for it"
            if problem is not None:
                self.faults.append(Fault(FORM, f"rank {rank}: {line}: {problem}"))

    def _either(self, part: Kind, j: int) -> Places:
        """Where stage `j` goes back through each micro-batch: whole, or with a part of it. A stage
        that has no backward is through with a micro-batch after its forward."""
        if j not in self.wiring.trained:
            return self.computed[Kind.FORWARD, j]
        return {**self.computed[part, j], **self.computed[Kind.BACKWARD, j]}

    def _compute(self, rank: int, position: int, line: Instruction) -> str | None:
        """A FORWARD, a backward or a part of one; returns what is wrong with it."""
        j, i = line.stage, line.microbatch
        stages = self.wiring.stages
        if j is None or not 0 <= j < len(stages):
            return f"there is no such stage (stages: {_span(len(stages))})"
        if stages[j].rank != rank:
            return f"stage {j} is on rank {stages[j].rank}"
        if i is None or i not in self.microbatches:
            return self._no_microbatch()
        if line.kind is not Kind.FORWARD:
            if not self.training:
                return "there is nothing to go back through"
            if self.asynchronous and line.kind not in (Kind.BACKWARD, Kind.UPDATE):
                return "an asynchronous step has whole backwards, each with its UPDATE"
        self._place(self.computed[line.kind, j], i, rank, position, line)
        return None

    def _update(self, rank: int, position: int, line: Instruction) -> str | None:
        """An UPDATE; returns what is wrong with it where there may be one."""
        if self.asynchronous:
            return self._compute(rank, position, line)
        reason = "an evaluation changes none"
        if self.training:
            reason = "they change after the step, which is synchronous"
        self.faults.append(Fault(UPDATED, f"rank {rank}: {line}: {reason}"))
        return None

    def _message(self, rank: int, position: int, line: Instruction) -> str | None:
        """A SEND or RECV; returns what is wrong with it."""
        name, i, peer = line.value, line.microbatch, line.peer
        if name is None:
            return "it names no value"
        if i is None or i not in self.microbatches:
            return self._no_microbatch()
        if peer is None or peer == rank or not 0 <= peer < len(self.lists):
            return f"its peer must be another rank (ranks: {_span(len(self.lists))})"
        sends = line.kind is Kind.SEND
        source, target = (rank, peer) if sends else (peer, rank)
        places = (self.sent if sends else self.received)[source, target, name, line.gradient]
        self._place(places, i, rank, position, line)
        channel = self.channels[source, target]
        end = channel.sends if sends else channel.receives
        end.labels.append((name, line.gradient, i))
        end.positions.append(position)
        return None

    def _part(self, rank: int, position: int, line: Instruction) -> str | None:
        """A phase of the vocabulary; returns the fault of this instruction alone."""
        if self.wiring.spread is None:
            return "no layer of the vocabulary is on all ranks"
        if line.value is None and line.kind not in HEAD:
            return "it names no value"
        if line.microbatch is None or line.microbatch not in self.microbatches:
            return self._no_microbatch()
        if not self.training and (line.gradient or line.kind in (Kind.T, Kind.EMBED_BACKWARD)):
            return "there are no gradients"
        part = Phase(line.kind, line.value or "", line.gradient)
        self._place(self.parts[rank].setdefault(part, {}), line.microbatch, rank, position, line)
        return None

    def _reduction(self, rank: int, position: int, line: Instruction) -> str | None:
        """A REDUCE_GRADIENTS; returns what is wrong with it."""
        if line.value is None:
            return "it names no tied tensor"
        if not self.training:
            return "there are no gradients"
        if rank not in line.ranks:
            return "it leaves out its own rank"
        if line.microbatch is not None:
            if self.wiring.lowered.zero < 2:
                return "no data rank keeps a piece of its gradients"
            if line.microbatch not in self.microbatches:
                return self._no_microbatch()
            places = self.scatters[rank].setdefault(line.value, {})
            self._place(places, line.microbatch, rank, position, line)
        elif line.value in self.reductions[rank]:
            self._repeated[rank, line] += 1
        else:
            self.reductions[rank][line.value] = position
        return None

    def _gather(self, rank: int, position: int, line: Instruction) -> str | None:
        """A gather behind the step; returns the fault of this instruction alone."""
        if line.value is None:
            return "it names no tensors"
        if not self.training or line.kind is not behind(self.wiring.lowered):
            return "no data rank updates what others need"
        if line.value in self.gathers[rank]:
            self._repeated[rank, line] += 1
        else:
            self.gathers[rank][line.value] = position
        return None

    def _shard(self, rank: int, position: int, line: Instruction) -> str | None:
        """An UNSHARD or RESHARD; returns the fault of this instruction alone."""
        j, stages = line.stage, self.wiring.stages
        if self.wiring.lowered.zero < 3:
            return "every data rank has whole parameters"
        if j is None or not 0 <= j < len(stages):
            return f"there is no such stage (stages: {_span(len(stages))})"
        if stages[j].rank != rank:
            return f"stage {j} is on rank {stages[j].rank}"
        if line.microbatch is None or line.microbatch not in self.microbatches:
            return self._no_microbatch()
        if line.kind is Kind.UNSHARD and line.ranks != (rank,):
            return "its parameters come from the data replicas of its own rank"
        self.sharding[j].append(position)
        return None

    def _share(self, rank: int, position: int, line: Instruction) -> str | None:
        """A SHARE_LOSS; nothing is wrong with it by itself."""
        if self.shares[rank] is None:
            self.shares[rank] = position
        else:
            self._repeated[rank, line] += 1
        return None

    def _place(self, places: Places, i: int, rank: int, position: int, line: Instruction) -> None:
        """Remember where an instruction stands, the first time that it does."""
        if i in places:
            self._repeated[rank, line] += 1
        else:
            places[i] = position

    def _no_microbatch(self) -> str:
        """The problem of a micro-batch that does not exist."""
        return f"there is no such micro-batch (micro-batches: {_span(len(self.microbatches))})"


def behind(lowered: Lowered) -> Kind | None:
    """How data ranks get what others have updated, behind the step."""
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
