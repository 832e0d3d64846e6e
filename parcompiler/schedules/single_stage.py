"""Naive model parallelism, GPipe and 1F1B: one stage on each rank, whole backwards.

    naive   rank 0  F0 .  .  B0 F1 .  .  B1       one micro-batch at a time goes all the way
            rank 1  .  F0 B0 .  .  F1 B1 .

    gpipe   rank 0  F0 F1 F2 .  .  B0 B1 B2       all forwards, then all backwards (1811.06965)
            rank 1  .  F0 F1 F2 B0 B1 B2 .

    1f1b    rank 0  F0 F1 .  B0 F2 B1 .  B2       a backward as soon as there is one
            rank 1  .  F0 B0 F1 B1 F2 B2 .        (PipeDream-Flush, 2006.09503)

Naive has a bubble of (p - 1)/p of the step and one micro-batch of activations on every rank. GPipe
and 1F1B have one of (p - 1)(f + b + w); GPipe keeps m micro-batches on every rank, 1F1B at most
p - r on rank r. Backwards run in the order of forwards, so gradients add up as in one process.
"""

from __future__ import annotations

from collections.abc import Iterator

from parcompiler.schedules.action import Action, Orders, backward, forward


def naive(ranks: int, microbatches: int) -> Orders:
    """Forward then backward of each micro-batch in turn."""
    return tuple(
        tuple(make(r, i) for i in range(microbatches) for make in (forward, backward))
        for r in range(ranks)
    )


def gpipe(ranks: int, microbatches: int) -> Orders:
    """All forwards, then all backwards."""
    return tuple(
        tuple(make(r, i) for make in (forward, backward) for i in range(microbatches))
        for r in range(ranks)
    )


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
