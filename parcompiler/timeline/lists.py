"""Writes an order of compute as instruction lists: one instruction for each step of a walk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from parcompiler.instruction import COMPUTE, EMBEDDING, Instruction, Kind
from parcompiler.schedules.action import NOWHERE
from parcompiler.schedules.rounds import repeated
from parcompiler.timeline.collectives import Collective
from parcompiler.timeline.order import OrderWalk, Step, TransferEnd


@dataclass(frozen=True, slots=True)
class InstructionNames:
    """Names and ranks in instructions: the values of the links; the value of each embedding and the
    rank that uses it; the input of the head and the rank that gives it."""

    values: Sequence[str]
    embedded: Sequence[tuple[str, int]] = ()
    head: tuple[str, int] = ("", NOWHERE)

    def line(self, step: Step) -> Instruction:
        """The instruction of a step."""
        if isinstance(step, Collective):
            return self._collective(step)
        if isinstance(step, TransferEnd):
            number, gradient, peer, i, leaves = step
            kind, value = Kind.SEND if leaves else Kind.RECV, self.values[number]
            return Instruction(kind, value=value, gradient=gradient, microbatch=i, peer=peer)
        kind, j, i = step
        if kind in EMBEDDING:
            return Instruction(kind, value=self.embedded[j][0], microbatch=i)
        return Instruction(kind, stage=None if j == NOWHERE else j, microbatch=i)

    def lists(
        self, walk: OrderWalk, untrained: AbstractSet[int] = frozenset(), rounds: int = 0
    ) -> list[tuple[Instruction, ...]] | None:
        """The instructions of every rank, without backwards of the `untrained` stages, which would
        compute, send and receive nothing. The loop is repeated by `rounds` further rounds; None if
        the walk has no loop that allows this."""
        if not rounds:
            (whole,) = walk.parts()
            return [tuple(self._lines(steps, untrained)) for steps in whole]
        if walk.steady is None:
            return None
        (end, pace), q = walk.steady, len(walk.codes)
        return [
            tuple(
                repeated([[*self._lines(steps, untrained)] for steps in parts], rounds, q, _later)
            )
            for parts in zip(*walk.parts(end - pace, end), strict=True)
        ]

    def _lines(self, steps: Iterable[Step], untrained: AbstractSet[int]) -> Iterator[Instruction]:
        """The instructions of some steps."""
        for line in map(self.line, steps):
            kind = line.kind
            if kind is Kind.FORWARD or kind not in COMPUTE or line.stage not in untrained:
                yield line

    def _collective(self, meeting: Collective) -> Instruction:
        """The instruction of a collective."""
        name, k, i = meeting
        carried, _, gradient = name.partition(".")
        if carried not in ("x", "e"):
            return Instruction(Kind.EXCHANGE, value=name, microbatch=i)
        value, peer = self.head if carried == "x" else self.embedded[k]
        kind = Kind.BROADCAST if name in ("x", "e.grad") else Kind.REDUCE
        grads = bool(gradient)
        return Instruction(kind, value=value, gradient=grads, microbatch=i, peer=peer)


def _later(lines: Iterable[Instruction], more: int) -> Iterator[Instruction]:
    """The lines with `more` added to their micro-batches."""
    for line in lines:
        assert line.microbatch is not None
        i = line.microbatch + more
        yield Instruction(line.kind, line.stage, i, line.value, line.gradient, line.peer)
