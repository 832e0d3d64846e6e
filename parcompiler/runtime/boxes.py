"""A piece of a tensor as a box: its offset and size in every dimension.

>>> one, two = Box((0, 2), (4, 3)), Box((3, 0), (2, 4))
>>> str(one.overlap(two))
'3:4,2:4'
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Box:
    """A range of every dimension of a whole tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box:
        """The intersection; a size is 0 where they have nothing in common."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self._ends(), other._ends())
        return Box(begins, tuple(max(0, end - b) for b, end in zip(begins, ends, strict=True)))

    def within(self, outer: Box) -> Box:
        """This box, counted from where `outer` begins."""
        offsets = (a - b for a, b in zip(self.offsets, outer.offsets, strict=True))
        return Box(tuple(offsets), self.sizes)

    def narrowed(self, dim: int, start: int, size: int) -> Box:
        """The part of this box from `start`, counted within it, along a dimension."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim], sizes[dim] = offsets[dim] + start, size
        return Box(tuple(offsets), tuple(sizes))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This box of a tensor, as a view."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            if size != tensor.shape[dim]:
                tensor = tensor.narrow(dim, offset, size)
        return tensor

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether it lies within a tensor of this shape."""
        return len(shape) == len(self.sizes) == len(self.offsets) and all(
            0 <= offset and 0 <= size and offset + size <= whole
            for offset, size, whole in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def _ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def __str__(self) -> str:
        """The box as a slice of each dimension."""
        return ",".join(f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True))
