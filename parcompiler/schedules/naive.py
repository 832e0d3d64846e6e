"""Naive model parallelism: one micro-batch at a time goes all the way, so one rank works at a time.

    rank 0  F0 . . B0 F1 . . B1
    rank 1  . F0 B0 . . F1 B1 .

Bubble (p - 1)/p of the step; one micro-batch of activations on every rank.
"""

from __future__ import annotations

from parcompiler.schedules.action import Orders, backward, forward


def naive(ranks: int, microbatches: int) -> Orders:
    """Forward then backward of each micro-batch in turn."""
    return tuple(
        tuple(make(r, i) for i in range(microbatches) for make in (forward, backward))
        for r in range(ranks)
    )
