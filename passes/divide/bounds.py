"""What no division can be below: units received by every stage, and units of the slowest rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from parcompiler.passes.divide.task import DivisionTask

SIZES = 16  # distinct sizes of blocks that `overfull` counts in


def reach(task: DivisionTask) -> tuple[list[int], list[int]]:
    """The first and the last stage of each block by the order alone, as no stage is empty.

    Stages beside a block's take blocks that are not above, or not below it.
    """
    blocks, final = len(task.loads), task.stages - 1
    first = [max(0, final - blocks + len(group)) for group in task.above]
    last = [min(final, blocks - len(task.below[i])) for i in range(blocks)]
    return first, last


def least_received(task: DivisionTask, first: Sequence[int], last: Sequence[int]) -> list[int]:
    """Units that each stage receives at least: what its first block is sure to receive.

    With one stage per rank that is all that the block consumes. With several, its rank may have
    that already, except what comes from the block before when that is of the stage before.
    """
    windows = list(zip(_sure(task), first, last, strict=True))
    return [
        0
        if task.each > 1 and j and task.placement[j] == task.placement[j - 1]
        else min((units for units, low, high in windows if low <= j <= high), default=0)
        for j in range(task.stages)
    ]


def _sure(task: DivisionTask) -> list[int]:
    """Units that each block receives, whatever the division, when it is the first of its stage."""
    if task.each == 1:
        return [sum(task.move[f] for f in flows) for flows in task.arriving]
    return [sum(task.move[f] for f in flows) for flows in task.links or [set()] * len(task.loads)]


def overfull(task: DivisionTask, capacity: Sequence[int]) -> bool:
    """Whether the blocks cannot fit into ranks of these units (of `compute`), wherever they are.

    A block of c units is c // size pieces of that size, and a rank has room for its units // size
    of them. Of 9 blocks of 10 units, 4 ranks of 29 units take 8: total and largest block say less.

    >>> from parcompiler.passes.divide.data import Load
    >>> task = DivisionTask([Load(1.0, 0, 0)] * 9, [], range(4), 1, [[(1,)]] * 4, [1] * 4)
    >>> [overfull(task, [units * task.compute[0] // 10] * 4) for units in (29, 30)]
    [True, False]
    """
    room = max(capacity)
    least = sorted(task.compute)
    # The rank of the largest block has a block on each of its other stages as well.
    if min(capacity) < sum(least[: task.each]) or room < least[-1] + sum(least[: task.each - 1]):
        return True
    sizes = Counter(task.compute).most_common(SIZES)
    return any(
        sum(units // size for units in task.compute) > sum(units // size for units in capacity)
        for size in [1, *(size for size, _ in sizes if size)]
    )


def crowded(task: DivisionTask) -> bool:
    """Whether the memory of the ranks is too small for the blocks, wherever they are put.

    A rank keeps what its blocks save as often as its least busy stage has micro-batches in flight,
    at least. Blocks of one size go into a rank as often as their bytes go into its limit; what
    blocks share, and copies of what they receive, are left out.

    >>> from parcompiler.passes.divide.data import Load
    >>> held = [[(2,)], [(1,)]]
    >>> loads = [Load(1.0, 10, 5)] * 3
    >>> tasks = [DivisionTask(loads, [], (0, 1), 4, held, [size] * 2) for size in (29, 30)]
    >>> list(map(crowded, tasks))
    [True, False]
    """
    if task.most <= min(task.room):
        return False
    flying = [max(map(min, vectors)) for vectors in task.held]
    sizes = Counter((load.resident, load.saved) for load in task.loads)
    least = min(flying)
    total = sum((fixed + least * each) * count for (fixed, each), count in sizes.items())
    if total > sum(task.room):
        return True
    for (fixed, each), count in sizes.most_common(SIZES):
        ranks = zip(flying, task.room, strict=True)
        places = (room // size for k, room in ranks if (size := fixed + k * each))
        if all(fixed + k * each for k in flying) and sum(places) < count:
            return True
    return False


def least_slowest(task: DivisionTask) -> int:
    """Units that the slowest rank has at least, by what `overfull` sees."""
    received = least_received(task, *reach(task))
    fixed = [sum(received[j] for j in stages) for stages in task.on]
    low, high = 0, task.longest + max(fixed)  # `high` is surely enough for one rank
    while low < high:
        middle = (low + high) // 2
        if overfull(task, [task.capacity(r, middle - units) for r, units in enumerate(fixed)]):
            low = middle + 1
        else:
            high = middle
    return low
