"""Which messages and collectives each compute instruction waits for, from a rank's list alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from parcompiler.errors import PlanError
from parcompiler.instruction import BACKWARDS, COMPUTE, EMBEDDING, HEAD, Instruction, Kind

GROUP = frozenset({Kind.BROADCAST, Kind.REDUCE, Kind.EXCHANGE})


class Ends(Protocol):
    """The names of the values that a stage receives and gives: `lower.Stage` has them."""

    @property
    def receives(self) -> tuple[str, ...]: ...

    @property
    def gives(self) -> tuple[str, ...]: ...


class Message(NamedTuple):
    """What a SEND and its RECV have in common."""

    source: int
    target: int
    value: str
    gradient: bool
    microbatch: int | None

    def __str__(self) -> str:
        name = f"{self.value}.grad" if self.gradient else self.value
        return f"{name} mb {self.microbatch} from rank {self.source}"


Use = Message | Instruction  # an instruction is a collective of the vocabulary
Place = tuple[int | None, int | None]  # stage and micro-batch


@dataclass(frozen=True, slots=True)
class Program:
    """The list of one rank. By position in it: what an instruction waits for, and uses last."""

    instructions: Sequence[Instruction]
    uses: Mapping[int, Sequence[Use]]
    releases: Mapping[int, Sequence[Use]]
    trained: frozenset[Place]  # those with a backward
    ends: frozenset[int]  # positions behind which the head needs nothing of a micro-batch


def program(rank: int, lines: Sequence[Instruction], stages: Sequence[Ends] | None) -> Program:
    """A rank's list with what each instruction uses."""
    uses = dict(_Walk(rank, lines, stages).uses())
    last = {use: position for position, found in uses.items() for use in found}
    releases = defaultdict(list)
    for use, position in last.items():
        releases[position].append(use)
    trained = {(line.stage, line.microbatch) for line in lines if line.kind in BACKWARDS}
    ends = {line.microbatch: k for k, line in enumerate(lines) if line.kind in HEAD}
    return Program(lines, uses, releases, frozenset(trained), frozenset(ends.values()))


def message(rank: int, line: Instruction) -> Message:
    """The message that a rank sends or receives."""
    assert line.value is not None and line.peer is not None
    source, target = (rank, line.peer) if line.kind is Kind.SEND else (line.peer, rank)
    return Message(source, target, line.value, line.gradient, line.microbatch)


class _Walk:
    """A walk over a list, with what was posted and not used yet."""

    def __init__(
        self, rank: int, lines: Sequence[Instruction], stages: Sequence[Ends] | None
    ) -> None:
        self.rank = rank
        self.lines = lines
        self.stages = stages
        self.posted: dict[tuple[int | None, bool, str | None], list[Use]] = defaultdict(list)
        self.forwards: dict[Place, list[Use]] = {}
        self.shared: dict[int | None, list[Instruction]] = defaultdict(list)  # of the group, by mb

    def uses(self) -> Iterator[tuple[int, list[Use]]]:
        """By position, what an instruction waits for; a backward uses its forward's too, but for
        the part that is left for later: what of that it needs counts with what layers leave."""
        for position, line in enumerate(self.lines):
            if line.kind is Kind.RECV:
                self._post(line, message(self.rank, line))
            elif line.kind in COMPUTE:
                yield position, self._of_stage(line)
            elif line.kind in HEAD | EMBEDDING:
                yield position, [*self._of_group(line)]
            elif line.kind in GROUP:
                if line.kind is Kind.REDUCE and line.peer == self.rank:
                    self._post(line, line)
                self.shared[line.microbatch].append(line)

    def _post(self, line: Instruction, use: Use) -> None:
        """Something is on its way to this rank's stages."""
        name = None if self.stages is None else line.value
        self.posted[line.microbatch, line.gradient, name].append(use)

    def _of_stage(self, line: Instruction) -> list[Use]:
        """What a compute instruction of a stage uses."""
        place, gradient = (line.stage, line.microbatch), line.kind in BACKWARDS
        if line.kind is not Kind.FORWARD and place not in self.forwards:
            text = f"rank {self.rank} at {line}: its FORWARD does not stand before it"
            raise PlanError(text)
        if line.kind is Kind.BACKWARD_WEIGHT:
            return []
        if self.stages is None:
            found = self.posted.pop((line.microbatch, gradient, None), [])
        else:
            keys = [(line.microbatch, gradient, name) for name in _names(line, self.stages)]
            found = [use for key in keys for use in self.posted.get(key, ())]
        if line.kind is Kind.FORWARD:
            self.forwards[place] = found
            return found
        return found + self.forwards[place]

    def _of_group(self, line: Instruction) -> Iterator[Instruction]:
        """What an instruction for the vocabulary waits for; those of the head keep x."""
        for other in self.shared[line.microbatch]:
            if line.kind is Kind.EMBED_BACKWARD:
                if other.kind is Kind.BROADCAST and other.gradient and other.value == line.value:
                    yield other
            elif line.kind in HEAD and not other.gradient and other.kind is not Kind.REDUCE:
                yield other


def _names(line: Instruction, stages: Sequence[Ends]) -> tuple[str, ...]:
    """The values that a forward waits for, or those whose gradients a backward waits for."""
    assert line.stage is not None
    stage = stages[line.stage]
    return stage.receives if line.kind is Kind.FORWARD else stage.gives
