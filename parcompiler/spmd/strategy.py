"""One way to compute an operator on the ranks of an axis, each on its local operands.

>>> from parcompiler.spmd.placement import I, R, S
>>> print(Strategy((S(2), R), (S(2),), sizes=(SizeArgument("size", 2, 16),)))
S(2) R -> S(2), size[2] = 16 split
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from parcompiler.spmd.placement import Placement

Draws = Literal["", "same", "own"]


@dataclass(frozen=True, slots=True)
class SizeArgument:
    """An argument that says a size: on a rank it is the size of the rank's piece of `whole`.

    `index` is the place in an argument that is a list; None for one that is a number.
    """

    argument: str
    index: int | None
    whole: int

    def __str__(self) -> str:
        """The argument, and the size that is split."""
        place = "" if self.index is None else f"[{self.index}]"
        return f"{self.argument}{place} = {self.whole} split"


@dataclass(frozen=True, slots=True)
class Strategy:
    """Types of the operands and results with which ranks compute an operator on their own.

    `inputs` are those of `NodeCall.operands`, in order. The call on a rank has its local
    operands, the arguments of `sizes` made local, and its result times `factor`. `special` names
    another computation than that of the operator (see `special`). `draws` says which random numbers
    ranks need: the same ones, or each its own.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    sizes: tuple[SizeArgument, ...] = ()
    factor: float = 1.0
    special: str = ""
    draws: Draws = ""

    @property
    def is_replicated(self) -> bool:
        """Whether every rank computes the whole."""
        return all(placement.is_whole for placement in (*self.inputs, *self.outputs))

    def __str__(self) -> str:
        """Inputs -> outputs, and what else differs from the operator on the whole."""
        notes = [*map(str, self.sizes)]
        notes += [f"times {self.factor:g}"] if self.factor != 1.0 else []
        notes += [self.special] if self.special else []
        notes += [f"draws {self.draws}"] if self.draws else []
        sides = (" ".join(map(str, side)) for side in (self.inputs, self.outputs))
        return ", ".join([" -> ".join(sides).strip(), *notes])


def localized(
    arguments: Mapping[str, Any], sizes: Sequence[SizeArgument], local: Callable[[int], int]
) -> dict[str, Any]:
    """The arguments of a call with their sizes made local.

    >>> localized({"size": [2, 16, 3]}, [SizeArgument("size", 1, 16)], lambda whole: whole // 4)
    {'size': [2, 4, 3]}
    """
    made = dict(arguments)
    for size in sizes:
        if size.index is None:
            made[size.argument] = local(size.whole)
        else:
            listed = list(made[size.argument])
            listed[size.index] = local(size.whole)
            made[size.argument] = listed
    return made
