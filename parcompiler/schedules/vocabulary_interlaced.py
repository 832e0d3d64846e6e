"""1F1B with the head on all ranks, which wait for each other in a slot S, N, T of every interval.

    rank p-4    F2 B-4 │ V0 │ F3 B-3 │ V1     odd from the last: the forward first
    rank p-3    B-3 F1 │ V0 │ B-2 F2 │ V1
    rank p-2    F0 B-2 │ V0 │ F1 B-1 │ V1
    rank p-1    B-1 F0 │ V0 │ B0  F1 │ V1     even: the backward first

An interval takes f + b and a slot on every rank, and no rank waits before the slot: a forward goes
on to the next rank within the same interval if that rank does its backward first. So a forward
passes two ranks per interval, a backward one. The rank d before the last has the forward of
k + d / 2 and the backward of k - 1 - d in interval k: 3 p / 2 micro-batches are in flight on rank
0, as in nnScaler (Lin et al., 2024) and section 6.1 of 2411.05288.
"""

from __future__ import annotations

from collections.abc import Iterator

from parcompiler.instruction import Kind
from parcompiler.schedules.action import NOWHERE, Action, Orders, backward, forward


def interlaced(ranks: int, microbatches: int) -> Orders:
    """The order of several ranks, for any number of micro-batches."""
    return tuple(tuple(_order(r, ranks - 1 - r, microbatches)) for r in range(ranks))


def _order(rank: int, behind: int, microbatches: int) -> Iterator[Action]:
    """The order of a rank with `behind` ranks after it."""
    for k in range(-(behind // 2), microbatches + behind + 1):
        computed = [backward(rank, k - 1 - behind), forward(rank, k + behind // 2)]
        for action in reversed(computed) if behind % 2 else computed:
            if 0 <= action.microbatch < microbatches:
                yield action
        if 0 <= k < microbatches:
            yield from (Action(kind, NOWHERE, k) for kind in (Kind.S, Kind.NORMALIZE, Kind.T))
