"""One way to compute an operator on the ranks of an axis, each with its local operands.

>>> from parcompiler.spmd.placement import I, R, S
>>> print(Strategy((S(2), R), (S(2),), sizes=(SizeArgument("size", 2, 16),)))
S(2) R -> S(2), size[2] = 16 split
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from parcompiler.spmd.placement import Placement

Draws = Literal["", "same", "own"]


@dataclass(frozen=True, slots=True)
class SizeArgument:
    """An argument that is a size: on a rank it becomes the size of the rank's piece of `whole`.

    `index` is the position in a list argument; None for a number.
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
    """Placements of operands and results with which each rank computes an operator locally.

    `inputs` are those of `NodeCall.operands`, in order. The call on a rank has local operands and
    local `sizes`, and its result is multiplied by `factor`. `special` names a computation other
    than the operator itself (see `special`). `draws` says whether ranks draw the same random
    numbers, or each its own.
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
        return all(placement.is_whole for placement in self.types)

    @property
    def types(self) -> tuple[Placement, ...]:
        """The placements of operands and results."""
        return (*self.inputs, *self.outputs)

    def placed(self, types: Iterable[Placement]) -> Strategy:
        """The same with other placements of operands and results."""
        every, number = tuple(types), len(self.inputs)
        return replace(self, inputs=every[:number], outputs=every[number:])

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
