"""1F1B with flush (PipeDream-Flush, 2006.09503): a backward as soon as there is one.

    rank 0  F0 F1 .  B0 F2 B1 .  B2
    rank 1  .  F0 B0 F1 B1 F2 B2 .

Bubble (p - 1)(f + b + w) as GPipe, but at most p - r micro-batches of activations on rank r.
"""

from __future__ import annotations

from collections.abc import Iterator

from parcompiler.schedules.action import Action, Orders, backward, forward


def one_f_one_b(ranks: int, microbatches: int) -> Orders:
    """min(p - r, m) forwards on rank r, then backward and forward in turn, then backwards."""
    return tuple(tuple(_order(r, ranks - r, microbatches)) for r in range(ranks))


def _order(rank: int, warm: int, microbatches: int) -> Iterator[Action]:
    """The order on one rank that starts with `warm` forwards."""
    yield from (forward(rank, i) for i in range(min(warm, microbatches)))
    for i in range(microbatches):
        yield backward(rank, i)
        if i + warm < microbatches:
            yield forward(rank, i + warm)
