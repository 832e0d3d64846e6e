"""Tokens to the ranks of their experts, and back: each expert rank has a piece of the experts.

    rank 0   rows by expert  a a b c c d ──┐ all-to-all ┌──►  a a a b b    experts a, b
    rank 1   rows by expert  a b c d d d ──┘            └──►  c c c d d d d   experts c, d

`ends` [experts] says where the rows of each expert end on a rank; `arrivals` [ranks, experts here]
how many come to this rank. Ranks exchange that first: an expert may get no rows, or all.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from parcompiler.runtime.axis import current
from parcompiler.runtime.tensor import linear_map

if TYPE_CHECKING:
    from parcompiler.runtime.axis import Axis


def histogram(
    x: torch.Tensor, bins: int = 100, least: float = 0.0, most: float = 0.0
) -> torch.Tensor:
    """`torch.histc` of integers [bins], which torch has only for floats on CPUs; exact up to counts
    of 2²⁴ there. Mixtures of experts count their tokens with it on GPUs."""
    if x.device.type != "cpu":
        return torch.histc(x, bins, least, most)
    return torch.histc(x.float(), bins, least, most).to(x.dtype)


def expert_arrivals(ends: torch.Tensor, *, axis: str = "expert") -> torch.Tensor:
    """`arrivals` [ranks, experts here] of this rank, from the `ends` [experts] of every rank."""
    group = current(axis)
    counts = ends.diff(prepend=ends.new_zeros(1)).view(group.size, -1)
    return group.exchange(counts, [1] * group.size, [1] * group.size)


def expert_ends(arrivals: torch.Tensor) -> torch.Tensor:
    """Where the rows of each expert of this rank end."""
    return arrivals.sum(0).cumsum(0, dtype=torch.int32)


def dispatch(
    rows: torch.Tensor, ends: torch.Tensor, arrivals: torch.Tensor, *, axis: str = "expert"
) -> torch.Tensor:
    """The rows [arriving, ...] for this rank's experts, by expert, out of all ranks' `rows`."""
    route = _Route(current(axis), rows.shape[0], ends, arrivals)
    return linear_map(rows, route.there, route.back)


def combine(
    rows: torch.Tensor, ends: torch.Tensor, arrivals: torch.Tensor, total: int, *,
    axis: str = "expert",
) -> torch.Tensor:  # fmt: skip
    """Inverse of `dispatch`: the `total` rows of this rank, out of those of all ranks' experts."""
    route = _Route(current(axis), total, ends, arrivals)
    return linear_map(rows, route.back, route.there)


class _Route:
    """Counts of rows between ranks; its two maps are the transposes of each other."""

    def __init__(self, axis: Axis, total: int, ends: torch.Tensor, arrivals: torch.Tensor) -> None:
        each = ends.view(axis.size, -1)[:, -1].tolist()
        self._axis, self._total = axis, total
        self._sent = [end - begin for begin, end in itertools.pairwise([0, *each])]
        self._arrivals: list[list[int]] = arrivals.tolist()
        self._received = list(map(sum, self._arrivals))

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        """Send rows to the ranks of their experts; arriving rows are sorted by expert."""
        received = self._axis.exchange(rows[: sum(self._sent)], self._sent, self._received)
        blocks = received.split([n for counts in self._arrivals for n in counts])
        each = len(self._arrivals[0])
        return torch.cat([block for k in range(each) for block in blocks[k::each]])

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Send rows back to the ranks they came from; rows of no expert are zeros."""
        blocks = rows.split([n for counts in zip(*self._arrivals, strict=True) for n in counts])
        ranks = len(self._arrivals)
        sent = torch.cat([block for k in range(ranks) for block in blocks[k::ranks]])
        returned = self._axis.exchange(sent, self._received, self._sent)
        missing = self._total - returned.shape[0]
        return (
            F.pad(returned, (0, 0) * (returned.dim() - 1) + (0, missing)) if missing else returned
        )
