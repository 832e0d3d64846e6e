"""ZB-H1 and ZB-H2 (2401.10241): gradients of weights wait, and fill the bubble.

    zb-h1   rank 0  F0 F1 F2 .  .  I0 W0 I1 W1 I2 W2
            rank 1  .  F0 F1 .  I0 F2 I1 W0 I2 W1 W2            [1]
            rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 W1 W2

    zb-h2   rank 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
            rank 1  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .       [2]
            rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

I is the input backward, W the weight backward, f, b and w are the times of F, I and W.
[1] No stage waits for W: after p - r forwards rank r does each W r micro-batches late, and so has
work left while the last backwards go up the ranks. [2] zb-h2 doubles that, and does 2(p - r) - 1
forwards first, so that there is no gap before the first backward either.

zb-h1: bubble (p - 1)(f + b - w) for m >= p; at most p activations on every rank.
zb-h2: bubble (p - 1 - r)(f + b - 2w) on rank r between its first action and its last, for
m >= 2p - 1; at most 2p - 1 activations on every rank. Ranks begin one after the other, and end
likewise: within the step each idles for at least (p - 1)f.
Fewer micro-batches leave fewer W to fill the bubble with. These bubbles need w <= f and w <= b for
zb-h1, w <= f and 2w <= f + b for zb-h2: a longer W itself holds up other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from parcompiler.schedules.action import Action, Orders, backward_input, backward_weight, forward


def zb_h1(ranks: int, microbatches: int) -> Orders:
    """p - r forwards on rank r, weights r micro-batches late."""
    return tuple(tuple(_order(r, ranks - r, r, microbatches)) for r in range(ranks))


def zb_h2(ranks: int, microbatches: int) -> Orders:
    """2(p - r) - 1 forwards on rank r, weights 2r micro-batches late."""
    return tuple(tuple(_order(r, 2 * (ranks - r) - 1, 2 * r, microbatches)) for r in range(ranks))


def _order(rank: int, warm: int, late: int, microbatches: int) -> Iterator[Action]:
    """The order on a rank that starts with `warm` forwards and whose weights are `late`."""
    yield from (forward(rank, i) for i in range(min(warm, microbatches)))
    for i in range(microbatches):
        yield backward_input(rank, i)
        if i >= late:
            yield backward_weight(rank, i - late)
        if i + warm < microbatches:
            yield forward(rank, i + warm)
    yield from (backward_weight(rank, i) for i in range(max(microbatches - late, 0), microbatches))
