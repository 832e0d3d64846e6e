"""An order of compute as instruction lists: every step of a walk by its instruction."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from parcompiler.instruction import COMPUTE, EMBEDDING, Instruction, Kind
from parcompiler.schedules.action import NOWHERE
from parcompiler.timeline.collectives import Collective
from parcompiler.timeline.order import OrderWalk, Step, TransferEnd


@dataclass(frozen=True, slots=True)
class InstructionNames:
    """The names and ranks that instructions have: of the links' values, by embedding the value and
    the rank that uses it, and of what the head takes and the rank that gives it."""

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
        self, walk: OrderWalk, untrained: AbstractSet[int] = frozenset()
    ) -> list[tuple[Instruction, ...]]:
        """The instructions of every rank, without backwards of the `untrained` stages: these would
        compute, send and receive nothing."""
        return [
            tuple(
                line
                for line in map(self.line, steps)
                if line.kind is Kind.FORWARD
                or line.kind not in COMPUTE
                or line.stage not in untrained
            )
            for steps in walk.steps()
        ]

    def _collective(self, meeting: Collective) -> Instruction:
        """The instruction of a collective."""
        what, k, i = meeting
        carried, _, gradient = what.partition(".")
        if carried not in ("x", "e"):
            return Instruction(Kind.EXCHANGE, value=what, microbatch=i)
        value, peer = self.head if carried == "x" else self.embedded[k]
        kind = Kind.BROADCAST if what in ("x", "e.grad") else Kind.REDUCE
        grads = bool(gradient)
        return Instruction(kind, value=value, gradient=grads, microbatch=i, peer=peer)
