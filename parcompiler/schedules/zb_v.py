"""ZB-V (2401.10241, section 6): no bubble, with the activations of 1F1B.

    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2 .
    rank 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2

3I0 is the input backward, 3W0 the weight backward of stage 3 for micro-batch 0. Rank r does
[1] 2(p - r) - 1 forwards of its first stage, [2] r times a forward of its second and of its first,
[3] p - r times forward and backward of its second, [4] forward and backward of its first and of
its second in turn until there are no forwards left, and then what is ready.

Between its first action and its last no rank idles when f = b = w and m >= 2p - 1, and all ranks
have at most p activations. Ranks begin one after the other, and end likewise: within the step each
idles for (p - 1)f/2. Fewer micro-batches take the order of 2p - 1 without the others: it still
runs, as micro-batches do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator

from parcompiler.instruction import Kind
from parcompiler.schedules.action import (
    Action,
    Orders,
    backward_input,
    backward_weight,
    forward,
)
from parcompiler.schedules.v_shape import finish, v_stages


def zb_v(ranks: int, microbatches: int) -> Orders:
    """The warm-up that lets every rank compute without a pause, then one unit of each in turn."""
    full = max(microbatches, 2 * ranks - 1)
    return finish([_head(r, ranks, full, microbatches) for r in range(ranks)], microbatches)


def _head(rank: int, ranks: int, full: int, microbatches: int) -> list[Action]:
    """The order of a rank up to its last forward."""
    parts = _order(rank, ranks, full, microbatches)
    order = [a for a in parts if a.microbatch < microbatches]
    last = max(k for k, action in enumerate(order) if action.kind is Kind.FORWARD)
    return order[: last + 1]


def _order(rank: int, ranks: int, full: int, microbatches: int) -> Iterator[Action]:
    """The order of a rank until all of `full` forwards are done; `full` is at least 2p - 1. It has
    all actions of the first `microbatches`, and perhaps of others."""
    first, second = v_stages(rank, ranks)
    lead = 2 * (ranks - rank) - 1
    yield from (forward(first, i) for i in range(min(lead, microbatches)))  # [1]
    for i in range(min(rank, microbatches)):  # [2]
        yield forward(second, i)
        yield forward(first, lead + i)
    for i in range(min(ranks - rank, microbatches)):  # [3]
        yield forward(second, rank + i)
        yield from _backward(second, i)
    for i in range(min(full - ranks, microbatches)):  # [4]
        yield forward(first, lead + rank + i)
        yield from _backward(first, i)
        yield forward(second, ranks + i)
        yield from _backward(second, ranks - rank + i)


def _backward(stage: int, microbatch: int) -> tuple[Action, Action]:
    """A backward in its two parts."""
    return backward_input(stage, microbatch), backward_weight(stage, microbatch)
