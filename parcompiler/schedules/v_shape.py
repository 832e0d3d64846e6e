"""The common part of schedules on a V: the placement of their stages, and how they end.

Rank r has stages r and 2p - 1 - r. A micro-batch goes down the ranks and up again, and so does
its backward (here p = 3):

    rank 0  0F0 .   .   .   .   5F0 5I0 .   .   .   .   0I0
    rank 1  .   1F0 .   .   4F0 .   .   4I0 .   .   1I0 .
    rank 2  .   .   2F0 3F0 .   .   .   .   3I0 2I0 .   .

The longer one stage of a rank waits for its backward, the shorter the other does, so that all ranks
can keep equally many activations. A schedule fixes the order of each rank up to its last forward.
After that nothing allocates memory, and a rank does what is ready: first input backwards, as other
ranks wait for them (those of its first stage before those of its second), then weight backwards.
What is ready at a time follows from a run of all ranks with f = b = w.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from parcompiler.instruction import Kind
from parcompiler.schedules.action import (
    Action,
    Orders,
    backward_input,
    backward_weight,
)

FORWARD, INPUT = Kind.FORWARD, Kind.BACKWARD_INPUT


def v_placement(ranks: int) -> tuple[int, ...]:
    """The rank of each stage.

    >>> v_placement(3)
    (0, 1, 2, 2, 1, 0)
    """
    return (*range(ranks), *reversed(range(ranks)))


def v_stages(rank: int, ranks: int) -> tuple[int, int]:
    """The two stages of a rank."""
    return rank, 2 * ranks - 1 - rank


def finish(heads: Sequence[Sequence[Action]], microbatches: int) -> Orders:
    """Complete the orders, which are given up to the last forward of each rank."""
    ranks = len(heads)
    # micro-batches that ended in the stage before; the first stage waits for none
    forwards = [microbatches] + [0] * (2 * ranks)
    inputs = [0] * (2 * ranks) + [microbatches]  # input backwards that have ended in the stage
    orders: list[list[Action]] = [[] for _ in heads]
    running = [
        (order, _actions(head, v_stages(r, ranks), microbatches, forwards, inputs))
        for r, (order, head) in enumerate(zip(orders, heads, strict=True))
    ]
    undone = 3 * microbatches * 2 * ranks
    awake = set(range(ranks))  # a rank that waits is asked again when a neighbour has done its part
    rank_of = v_placement(ranks)
    while undone:
        slot = []
        for rank in sorted(awake):
            order, actions = running[rank]
            if (action := next(actions)) is None:
                awake.discard(rank)
            else:
                order.append(action)
                slot.append(action)
        assert slot, f"ranks wait for each other after {forwards} and {inputs}"
        undone -= len(slot)
        for kind, stage, _ in slot:
            if kind is FORWARD:
                forwards[stage + 1] += 1
                awake.update(rank_of[stage + 1 : stage + 2])
            elif kind is INPUT:
                inputs[stage] += 1
                awake.update(rank_of[max(0, stage - 1) : stage])
    return tuple(map(tuple, orders))


def _actions(
    head: Sequence[Action],
    stages: tuple[int, int],
    microbatches: int,
    forwards: Sequence[int],
    inputs: Sequence[int],
) -> Iterator[Action | None]:
    """The action of a rank in each slot, given what has ended before; None where it waits.

    First the actions of `head`, in which weight backwards have the order of the input backwards;
    then input backwards before weight backwards.
    """
    begun, weights = dict.fromkeys(stages, 0), deque[Action]()
    for action in head:
        kind, stage, i = action
        if kind is FORWARD:
            while forwards[stage] <= i:
                yield None
        elif kind is INPUT:
            while inputs[stage + 1] <= i:
                yield None
            begun[stage] += 1
            weights.append(backward_weight(stage, i))
        else:
            weights.popleft()
        yield action
    while True:
        for stage, i in begun.items():
            if i < microbatches and i < inputs[stage + 1]:
                begun[stage] += 1
                weights.append(backward_weight(stage, i))
                yield backward_input(stage, i)
                break
        else:
            yield weights.popleft() if weights else None
