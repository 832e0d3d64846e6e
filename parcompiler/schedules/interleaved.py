"""Interleaved 1F1B (2104.04473): v stages on each rank, so that filling the pipe takes 1/v of it.

Two ranks with two stages each; chunk c on rank r is stage c·p + r. 2F0 is stage 2, micro-batch 0:

    rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
    rank 1  .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .

Micro-batches go in rounds of p: all of a round through chunk 0, then all of it through chunk 1,
and so on, then the next round; backwards likewise, last chunk first. Rank r starts with
2(p - r - 1) + (v - 1)p forwards, then forward and backward alternate.

Bubble (p - 1)(f + b + w)/v when p divides m; p + (p - 1)/v activations on rank 0. A last round of
s < p micro-batches is a whole round from which the others are left out. It still runs, as
micro-batches do not wait for each other, and idles at most (p - s)(f + b + w)(v - 1)/v more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest

from parcompiler.schedules.action import Action, Orders, backward, forward


def interleaved(ranks: int, microbatches: int, virtual_stages: int) -> Orders:
    """Rounds of p micro-batches through v chunks, one forward and one backward in turn."""
    whole = ranks * -(-microbatches // ranks)  # rounded up to whole rounds
    return tuple(
        tuple(a for a in _order(r, ranks, whole, virtual_stages) if a.microbatch < microbatches)
        for r in range(ranks)
    )


def _order(rank: int, ranks: int, microbatches: int, virtual_stages: int) -> Iterator[Action]:
    """The order on one rank when `ranks` divides `microbatches`."""
    stages = range(rank, ranks * virtual_stages, ranks)
    forwards = _rounds(forward, stages, ranks, microbatches)
    backwards = _rounds(backward, stages[::-1], ranks, microbatches)
    warm = 2 * (ranks - rank - 1) + (virtual_stages - 1) * ranks
    yield from forwards[:warm]
    for early, late in zip_longest(forwards[warm:], backwards):
        if early is not None:
            yield early
        yield late


def _rounds(
    make: Callable[[int, int], Action], stages: range, size: int, microbatches: int
) -> list[Action]:
    """Rounds of `size` micro-batches, each through all stages."""
    return [
        make(j, i)
        for first in range(0, microbatches, size)
        for j in stages
        for i in range(first, first + size)
    ]
