"""One way to compute an operator on the ranks of an axis, each on what it holds.

>>> from parcompiler.spmd.placement import I, R, S
>>> print(Strategy((S(2), R), (S(2),), sizes=(Size("size", 2, 16),)))
S(2) R -> S(2), size[2] = 16 split
>>> Size("size", 2, 16).local(n=4, rank=0)
4
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from parcompiler.pieces import piece
from parcompiler.spmd.placement import Placement

Draws = Literal["", "same", "own"]


@dataclass(frozen=True, slots=True)
class Size:
    """An argument that says a size: on a rank it says how many of the `whole` are its own.

    `index` is the place in an argument that is a list; None for one that is a number.
    """

    argument: str
    index: int | None
    whole: int

    def local(self, n: int, rank: int) -> int:
        """What the argument is on `rank`."""
        return piece(self.whole, n, rank).size

    def __str__(self) -> str:
        """The argument, and the size that is split."""
        place = "" if self.index is None else f"[{self.index}]"
        return f"{self.argument}{place} = {self.whole} split"


@dataclass(frozen=True, slots=True)
class Strategy:
    """Types of the operands and results with which ranks compute an operator without talking.

    `inputs` are those of `Call.operands`, in order. The call on a rank has its local operands, the
    arguments of `sizes` made local, and its result times `factor`. `special` names another
    computation than that of the operator (a key of `special.LOCAL`, or one of `special.TALKING`,
    which need collectives inside). `draws` says which random numbers ranks need: the same ones, or
    each its own.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    sizes: tuple[Size, ...] = ()
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
    arguments: Mapping[str, Any], sizes: Sequence[Size], n: int, rank: int
) -> dict[str, Any]:
    """The arguments of a call with their sizes made local.

    >>> localized({"size": [2, 16, 3]}, [Size("size", 1, 16)], n=4, rank=0)
    {'size': [2, 4, 3]}
    """
    local = dict(arguments)
    for size in sizes:
        if size.index is None:
            local[size.argument] = size.local(n, rank)
        else:
            items = list(local[size.argument])
            items[size.index] = size.local(n, rank)
            local[size.argument] = items
    return local
