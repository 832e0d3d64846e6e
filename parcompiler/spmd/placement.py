"""The placement of a value on the ranks of one mesh axis: `R`, `I`, `S(d)` or `P`.

| type   | each rank holds              | the gradient that a rank holds                 |
|--------|------------------------------|------------------------------------------------|
| `R`    | the whole value              | a summand: the gradient is the sum over ranks  |
| `I`    | the whole value              | the whole gradient, the same on every rank     |
| `S(d)` | its piece along dimension d  | that piece of the gradient                     |
| `P`    | a summand of the value       | the whole gradient, the same on every rank     |

A value without a gradient that every rank holds whole is `R`.

Pieces are those of `parcompiler.pieces`.

A dimension may consist of *segments*, each of which is split by itself: the fused projection of
queries, keys and values is one matrix whose rows are three segments.

>>> placement = S(0, (8, 4, 4))
>>> print(placement, local_shape((16, 32), placement, 2, 0))
S(0: 8 4 4) (8, 32)
>>> parse(str(placement)) == placement
True

Rows of context ranks may be dealt `zigzag`, as two chunks from either end: `S(1 zigzag)`. Rows that
each of these ranks has `sorted` for itself (`S(0 sorted)`) are its own rows in its own order,
without conversions: they are no piece of the rows that one rank would sort. Counts of such rows are
`P(0 sorted)`, as other summands are not the counts of the rank's rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from parcompiler.errors import InputError
from parcompiler.pieces import Shard

Kind = Literal["R", "I", "S", "P"]


@dataclass(frozen=True, slots=True)
class Placement:
    """The type of a value on one axis; `dim` (not negative) and the other fields belong to `S`."""

    kind: Kind
    dim: int = -1
    segments: tuple[int, ...] = ()
    zigzag: bool = False
    sorted: bool = False

    def __str__(self) -> str:
        """The text that `parse` reads."""
        if self.dim < 0:
            return self.kind
        segments = f": {' '.join(map(str, self.segments))}" if self.segments else ""
        return (
            f"{self.kind}({self.dim}{' zigzag' * self.zigzag}{' sorted' * self.sorted}{segments})"
        )

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds the whole value."""
        return self.kind in ("R", "I")


R = Placement("R")
I = Placement("I")  # noqa: E741  (the letter of the literature)
P = Placement("P")


def S(dim: int, segments: Sequence[int] = ()) -> Placement:
    """Split along `dim` (counted from the front), within each of the `segments` if there are."""
    assert dim >= 0, f"a placement counts dimensions from the front (got {dim})"
    return Placement("S", dim, tuple(segments))


_TEXT = re.compile(
    r"(?P<whole>[RIP])|(?P<kind>S|P(?=\(0( zigzag)? sorted))\((?P<dim>\d{1,9})"
    r"(?P<zigzag> zigzag)?(?P<sorted> sorted)?(?::(?P<segments>( \d{1,18})+))?\)"
)


def parse(text: str) -> Placement:
    """The placement that `text` names.

    >>> [str(parse(word)) for word in ("I", "S(2)", "S(1 zigzag: 8 8)", "P(0 sorted)")]
    ['I', 'S(2)', 'S(1 zigzag: 8 8)', 'P(0 sorted)']
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        message = f"{text!r} is no placement: write 'R', 'I', 'P' or 'S(0)' with a dimension"
        raise InputError(message)
    for whole in (R, I, P):
        if match["whole"] == whole.kind:
            return whole
    segments = tuple(map(int, (match["segments"] or "").split()))
    zigzag, own_order = match["zigzag"] is not None, match["sorted"] is not None
    kind: Kind = "P" if match["kind"] == "P" else "S"
    return Placement(kind, int(match["dim"]), segments, zigzag, own_order)


def shard_of(placement: Placement, size: int) -> Shard:
    """How a dimension of `size` is split by an `S`."""
    assert placement.kind == "S", f"{placement} has no pieces"
    segments = placement.segments or (size,)
    assert sum(segments) == size, f"segments {segments} of a dimension of {size}"
    return Shard(placement.dim, segments, placement.zigzag)


def local_shape(
    shape: Sequence[int], placement: Placement, n: int, rank: int = 0
) -> tuple[int, ...]:
    """The shape of what `rank` holds of a value of `shape`; rank 0 holds a largest piece.

    >>> local_shape((50257, 8), S(0), 4, rank=3)
    (12564, 8)
    """
    local = list(shape)
    if placement.kind == "S":
        local[placement.dim] = shard_of(placement, shape[placement.dim]).length(n, rank)
    return tuple(local)


def resized(value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor without data of another shape, whose dimensions lie in the same order in memory.

    >>> resized(torch.empty(4, 6, device="meta").t(), (3, 4)).stride()
    (1, 3)
    """
    strides, step = [0] * value.dim(), 1  # stride 0 stays 0: an expanded dimension
    for dim in sorted(range(value.dim()), key=lambda dim: (value.stride(dim), -dim)):
        if value.stride(dim):
            strides[dim] = step
            step *= max(1, shape[dim])
    return value.new_empty_strided(tuple(shape), strides)


def take(value: torch.Tensor, placement: Placement, n: int, rank: int) -> torch.Tensor:
    """The piece of a whole `value` that `rank` holds."""
    return shard_of(placement, value.shape[placement.dim]).take(value, n, rank)


def join(pieces: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor:
    """The whole value from the pieces of all ranks, in order."""
    size = sum(part.shape[placement.dim] for part in pieces)
    return shard_of(placement, size).join(pieces)
