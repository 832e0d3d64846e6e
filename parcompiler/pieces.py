"""The part of a dimension that each rank holds: arithmetic that planning and runtime share.

Pieces are those of `torch.tensor_split`: they differ by at most one element, the longer ones come
first, and every rank has one if there are at least as many elements as ranks (`torch.chunk` would
divide 5 elements on 4 ranks as 2, 2, 1, 0).

>>> [piece(50257, 4, rank).size for rank in range(4)]
[12565, 12564, 12564, 12564]

A dimension may consist of *segments*, each of which is split by itself: the fused projection of
queries, keys and values is one matrix whose rows are three segments.

>>> shard = Shard(0, (8, 4, 4))
>>> [(span.start, span.size) for span in shard.spans(2, 1)]
[(4, 4), (10, 2), (14, 2)]
>>> whole = torch.arange(16)
>>> bool((shard.join([shard.take(whole, 2, rank) for rank in range(2)]) == whole).all())
True

*Zigzag* pieces are two chunks, one from either end, so that under a causal mask the rows of all
ranks attend to equally many others (Llama 3, arXiv 2407.21783, section 3.3.2).

>>> [Shard(0, (12,), zigzag=True).spans(3, rank) for rank in range(3)]  # doctest: +ELLIPSIS
[(Span(start=0, size=2), Span(start=10, size=2)), (Span(start=2, ...), (Span(start=4, ...)]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True, slots=True)
class Span:
    """A run of elements of one dimension."""

    start: int
    size: int


def piece(size: int, n: int, rank: int) -> Span:
    """The piece of `rank` when `size` elements are dealt to `n` ranks."""
    short, longer = divmod(size, n)
    return Span(rank * short + min(rank, longer), short + (rank < longer))


def rows(size: int, n: int) -> int:
    """The number of rows of each of `n` ranks for a vocabulary of `size`, equal on all ranks.

    A piece of the vocabulary is padded so that ranks take equally long, and to a multiple of 8 (of
    2 where it is small), which suits matrix units.

    >>> rows(50257, 4), rows(13, 2)
    (12568, 8)
    """
    each = -(-size // n)
    step = 8 if each >= 1024 else 2
    return -(-each // step) * step


def own_rows(size: int, n: int, rank: int) -> Span:
    """The rows of a vocabulary that `rank` holds: the last ranks may have fewer than `rows`.

    >>> own_rows(13, 2, 1), own_rows(3, 4, 3)
    (Span(start=8, size=5), Span(start=3, size=0))
    """
    each = rows(size, n)
    start = min(rank * each, size)
    return Span(start, min(each, size - start))


def dealt(
    sizes: Mapping[str, int], n: int, homes: Mapping[str, int] = MappingProxyType({})
) -> dict[str, int]:
    """The rank, of `n`, that gets each of some undivided tensors: the largest first, each to the
    rank with least so far (Graham 1969: at most 4/3 of the optimum); tensors in `homes` are fixed.

    >>> dealt({"a": 4, "b": 3, "c": 3, "d": 2}, 2)
    {'a': 0, 'b': 1, 'c': 1, 'd': 0}
    """
    loads, owners = [0] * n, dict[str, int]()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owners[name] = homes[name] if name in homes else loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


@dataclass(frozen=True, slots=True)
class Shard:
    """How a tensor is split: along `dim`, with the sizes of its segments (one size if it has none).

    With `zigzag` each segment is divided into two chunks per rank.

    >>> Shard(0, (50257,)).length(4, rank=3), Shard(0, (50257,)).whole
    (12564, 50257)
    """

    dim: int
    sizes: tuple[int, ...]
    zigzag: bool = False

    @property
    def whole(self) -> int:
        """The size of the dimension when nothing is split."""
        return sum(self.sizes)

    def even(self, n: int) -> bool:
        """Whether all ranks hold equally much."""
        return all(size % n == 0 for size in self.sizes)

    def in_order(self, n: int, shape: Sequence[int]) -> bool:
        """Whether the equal pieces of all ranks, one after another in memory, are the whole;
        `shape` is that of the whole or of a piece.

        >>> rows = Shard(1, (8,))
        >>> rows.in_order(4, (1, 8, 3)), rows.in_order(4, (2, 8, 3)), rows.in_order(3, (1, 8, 3))
        (True, False, False)
        """
        plain = len(self.sizes) == 1 and not self.zigzag
        return plain and self.even(n) and math.prod(shape[: self.dim]) == 1

    def spans(self, n: int, rank: int) -> tuple[Span, ...]:
        """The runs of `rank` in the dimension: a piece, or two chunks, of each segment."""
        places = ((rank, 2 * n), (2 * n - 1 - rank, 2 * n)) if self.zigzag else ((rank, n),)
        spans = []
        for start, size in zip(itertools.accumulate((0, *self.sizes)), self.sizes, strict=False):
            for place, of in places:
                part = piece(size, of, place)
                spans.append(Span(start + part.start, part.size))
        return tuple(spans)

    def length(self, n: int, rank: int) -> int:
        """The number of elements of the dimension that `rank` holds."""
        return sum(piece(size, n, rank).size for size in self.sizes)

    def shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor, from that of a piece."""
        return (*local[: self.dim], self.whole, *local[self.dim + 1 :])

    def take(self, whole: torch.Tensor, n: int, rank: int) -> torch.Tensor:
        """The piece of `rank`, a view if it is one run."""
        spans = self.spans(n, rank)
        parts = [whole.narrow(self.dim, span.start, span.size) for span in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def pad(self, local: torch.Tensor, n: int, rank: int) -> torch.Tensor:
        """The whole with the piece of `rank` in its place and zeros elsewhere."""
        padded = local.new_zeros(self.shape(local.shape))
        spans = self.spans(n, rank)
        for part, span in zip(self._parts(local, n, rank), spans, strict=True):
            padded.narrow(self.dim, span.start, span.size).copy_(part)
        return padded

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole from the pieces of all ranks, in order."""
        n = len(pieces)
        spans = [span for rank in range(n) for span in self.spans(n, rank)]
        parts = [part for rank, local in enumerate(pieces) for part in self._parts(local, n, rank)]
        order = sorted(range(len(spans)), key=lambda place: spans[place].start)
        return torch.cat([parts[place] for place in order], self.dim)

    def _parts(self, local: torch.Tensor, n: int, rank: int) -> tuple[torch.Tensor, ...]:
        """The piece of `rank`, divided into its runs."""
        parts: tuple[torch.Tensor, ...] = local.split(
            [span.size for span in self.spans(n, rank)], self.dim
        )
        return parts
