"""A schedule: which forward or backward each rank computes next. It only orders compute.

Communication is added by lowering, once, for all schedules. Stage `j` runs on rank
`placement[j]`; with one stage per rank that is the identity.

>>> from parcompiler.schedules import build
>>> print(build("1f1b", ranks=2, microbatches=3))
rank 0: F0 F1 B0 F2 B1 B2
rank 1: F0 B0 F1 B1 F2 B2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from parcompiler.instruction import Kind


class Action(NamedTuple):
    """One compute instruction: `kind` of stage `stage` for micro-batch `microbatch`."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        """`F3` or `B3`."""
        return f"{self.kind.value[0]}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of compute on every rank."""

    name: str
    placement: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        """One line per rank."""
        lines = (" ".join(map(str, order)) for order in self.orders)
        return "\n".join(f"rank {rank}: {line}" for rank, line in enumerate(lines))

    def in_flight(self, stage: int) -> int:
        """The largest number of micro-batches whose forward is done and whose backward is not."""
        alive = peak = 0
        for action in self.orders[self.placement[stage]]:
            if action.stage == stage:
                alive += 1 if action.kind is Kind.FORWARD else -1
                peak = max(peak, alive)
        return peak


def forward(stage: int, microbatch: int) -> Action:
    """The forward of a stage for a micro-batch."""
    return Action(Kind.FORWARD, stage, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """The backward of a stage for a micro-batch."""
    return Action(Kind.BACKWARD, stage, microbatch)
