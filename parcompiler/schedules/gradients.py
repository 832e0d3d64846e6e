"""The gradients of parameters in a step: none at first, then those of one micro-batch after another
are added to what the first backward of their stage has left.

    F0 F1 B0 F2 B1 ..       [1] B0 makes all of them
    F0 F1 I0 F2 I1 W0 ..    [2] I0 makes those that linear layers do not leave, and W0 the rest

>>> from parcompiler.schedules.timing import StageCost
>>> cost = StageCost(1.0, 2.0, resident=9, saved=10, first=First(gradients=7, backward_more=2))
>>> made = Made()
>>> [made.bytes(0, cost, kind) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD)]
[(10, 0), (2, -5), (0, -10)]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from parcompiler.instruction import Kind

if TYPE_CHECKING:
    from parcompiler.schedules.timing import StageCost


@dataclass(frozen=True, slots=True)
class First:
    """What the first backward of a step leaves on a stage: `gradients` bytes. Of one in two parts,
    the second leaves `later` of them. They come one by one: while that runs, the others are alive
    in place of those that `StageCost` has under the same names."""

    gradients: int = 0
    later: int = 0
    backward_more: int = 0
    input_more: int = 0
    weight_more: int = 0


class Made:
    """The gradients so far, of which each compute instruction is told in its order."""

    def __init__(self) -> None:
        self.of: dict[int, int] = {}  # bytes by stage
        self.complete: set[int] = set()  # the stages that have all

    def bytes(self, stage: int, cost: StageCost, kind: Kind) -> tuple[int, int]:
        """What an instruction of a stage changes, in bytes: with its begin, and with its end."""
        taken, given = cost.bytes(kind)
        if kind is Kind.FORWARD or stage in self.complete:
            return taken, given
        first = cost.first
        match kind:
            case Kind.BACKWARD if stage not in self.of:
                more, new = first.backward_more, first.gradients
            case Kind.BACKWARD_INPUT if stage not in self.of:
                more, new = first.input_more, first.gradients - first.later
            case Kind.BACKWARD_WEIGHT:
                more, new = first.weight_more, first.later
            case Kind.BACKWARD:  # behind a first part
                more, new = taken + first.later, first.later
            case _:
                return taken, given
        self.of[stage] = self.of.get(stage, 0) + new
        if kind is not Kind.BACKWARD_INPUT or not first.later:
            self.complete.add(stage)
        return more, taken + given + new - more
