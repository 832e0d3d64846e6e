"""GPipe (1811.06965): all forwards, then all backwards, then one update.

    rank 0  F0 F1 F2 .  .  B0 B1 B2
    rank 1  .  F0 F1 F2 B0 B1 B2 .

Backwards run in forward order, so gradients add up in the order of one process. Bubble
(p - 1)(f + b + w); m micro-batches of activations on every rank.
"""

from __future__ import annotations

from parcompiler.schedules.action import Orders, backward, forward


def gpipe(ranks: int, microbatches: int) -> Orders:
    """All forwards, then all backwards."""
    return tuple(
        tuple(make(r, i) for make in (forward, backward) for i in range(microbatches))
        for r in range(ranks)
    )
