"""Two stages per rank: the runs in which the slowest rank takes the fewest seconds.

    V shape        | 0 | 1 | 2 | 2 | 1 | 0 |      rank r has a run from the front, and one from the
    interleaved    | 0 | 1 | 2 | 0 | 1 | 2 |      back, or one after the middle

A dynamic programme: rank after rank takes a run of the front, of every length, and as many blocks
of the other side as a cap on its seconds, and its memory, allow. Of the ways to one end of the
front, the one that takes most of the other side is kept. Bisection finds the least cap with which
all blocks are taken.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from parcompiler.passes.divide.runs import snug
from parcompiler.passes.divide.task import DivisionTask

PRECISION = 1000  # steps of the cap in the units of an even rank
MIDDLES = 6  # middles to try for interleaved stages: those nearest to half of the work

Counts = npt.NDArray[np.int64]
Taken = list[tuple[int, int]]  # by each rank: blocks of the front, and of the other side


def paired_runs(task: DivisionTask) -> tuple[int, ...] | None:
    """The runs whose slowest rank takes about the least time, with no block run twice; None where
    none fit, or for other placements than these two.

    Memory counts as if each stage received the largest value, and each rank had the block with the
    largest `moment`.

    >>> from parcompiler.passes.divide.data import Load
    >>> loads = [Load(seconds, 0, 0) for seconds in (1.0, 2.0, 1.0, 1.0, 2.0, 1.0)]
    >>> paired_runs(DivisionTask(loads, [], (0, 1, 1, 0), 1, [[(1, 1)]] * 2, [1.0] * 2))
    (0, 1, 2, 2, 3, 3)
    """
    best: tuple[int, ...] | None = None
    cap: int | None = None
    for sides in _sides(task, snug(task)):
        if pair := _least(task, sides, cap):
            cap, best = pair[0], sides.stage_of(pair[1])
    return best


def slowest_pair(task: DivisionTask, known: int = 0) -> int:
    """Lower bound on the units of the slowest rank of a V with unlimited memory; 0 for other
    placements, and where it is not above the bound `known`.

    >>> from parcompiler.passes.divide.data import Load
    >>> loads = [Load(seconds, 0, 0) for seconds in (1.0, 2.0, 1.0, 1.0, 2.0, 1.0)]
    >>> task = DivisionTask(loads, [], (0, 1, 1, 0), 1, [[(1, 1)]] * 2, [1.0] * 2)
    >>> slowest_pair(task) * task.unit > 3.98
    True
    """
    roomy = dataclasses.replace(task, limits=[math.inf] * task.ranks, held=[()] * task.ranks)
    for sides in _sides(roomy, sum(task.compute)):
        if sides.is_v and sides.taken(known) is None and (pair := _least(roomy, sides, None)):
            return pair[0] - max(1, task.even // PRECISION)
    return 0


def _least(task: DivisionTask, sides: _Sides, most: int | None) -> tuple[int, Taken] | None:
    """The least cap, or one hardly above it, with which all blocks are taken, and the blocks that
    each rank takes; None where the cap is not below `most`."""
    step, low = max(1, task.even // PRECISION), task.even - 1
    high = top = max(map(sum, task.cost)) if most is None else most - step
    best: Taken | None = None
    while high - low > step and (best is not None or low < top):
        cap = (low + high) // 2 if best is not None else min(top, low + (low >> 3) + 1)
        taken = sides.taken(cap)
        low, high, best = (cap, high, best) if taken is None else (low, cap, taken)
    return None if best is None else (high, best)


def _sides(task: DivisionTask, longest: int) -> Iterator[_Sides]:
    """The two sides of a V, or those of interleaved stages for each middle that is tried. No stage
    takes more than `longest` units."""
    ranks, blocks, placement = task.ranks, len(task.loads), tuple(task.placement)
    if placement == (*range(ranks), *reversed(range(ranks))):
        yield _Sides(task, range(blocks), range(blocks - 1, -1, -1), longest, is_v=True)
    elif placement == (*range(ranks), *range(ranks)):
        done = [*itertools.accumulate(task.compute, initial=0)]
        near = sorted(range(ranks, blocks - ranks + 1), key=lambda i: abs(2 * done[i] - done[-1]))
        for middle in near[:MIDDLES]:
            yield _Sides(task, range(middle), range(middle, blocks), longest, is_v=False)


@dataclass(frozen=True)
class _Sides:
    """The blocks from which each rank's first and second stage take runs, in this order. In a V
    both are all blocks, from either end."""

    task: DivisionTask
    front: range
    back: range
    longest: int
    is_v: bool

    @cached_property
    def seconds(self) -> list[tuple[Counts, Counts]]:
        """By rank, the cumulative units of the blocks of both sides."""
        task = self.task
        rows = task.cost[:1] if task.is_uniform else task.cost
        sums = [(_sums(row, self.front), _sums(row, self.back)) for row in rows]
        return sums * (task.ranks // len(sums))

    @cached_property
    def bytes(self) -> list[list[tuple[Counts, Counts, int]]]:
        """By rank and vector of micro-batches in flight, the cumulative bytes of the blocks of both
        sides, and the bytes that they may take."""
        task, sums = self.task, []
        resident = [load.resident + sum(size for _, size in load.shared) for load in task.loads]
        saved = [load.saved for load in task.loads]
        copy = max((flow.saved for flow in task.flows), default=0)
        moment = max(load.moment for load in task.loads)
        fixed, each = ((_sums(x, self.front), _sums(x, self.back)) for x in (resident, saved))
        for rank in range(task.ranks):
            row = []
            for first, second in task.held[rank]:
                received = copy * ((first + 1) * (rank > 0) + second + 1)
                room = task.room[rank] - moment - received
                row.append((fixed[0] + first * each[0], fixed[1] + second * each[1], room))
            sums.append(row)
        return sums

    def taken(self, cap: int) -> Taken | None:
        """The blocks that each rank takes if no rank takes more than `cap` units, and no stage more
        than `longest`; None where some blocks are left."""
        task, fronts, longest = self.task, len(self.front), min(cap, self.longest)
        ends = np.arange(fronts + 1)
        at = np.where(ends == 0, 0, -1)  # blocks of the other side, by those of the front
        ways: list[tuple[Counts, Counts]] = []
        for rank in range(task.ranks):
            rest = task.ranks - 1 - rank  # blocks that each side must leave
            most = fronts - 2 * rest - ends if self.is_v else 0 * ends + len(self.back) - rest
            first, second = self.seconds[rank]
            budgets = [(first, second, cap), (0 * first, second, longest), *self.bytes[rank]]
            taking = np.flatnonzero(at[:-1] >= 0)
            last = np.searchsorted(first, first[taking] + longest, "right") - 1
            counts = np.maximum(last - taking, 0)  # numbers of runs that begin there
            begin = np.repeat(taking, counts)
            length = np.arange(1, len(begin) + 1) - np.repeat(np.cumsum(counts) - counts, counts)
            end = begin + length
            reach = most[end]
            for mine, other, budget in budgets:
                whole = other[at[begin]] + mine[begin] + budget - mine[end]
                reach = np.minimum(reach, np.searchsorted(other, whole, "right") - 1)
            further, lengths = np.full(fronts + 1, -1), np.full(fronts + 1, fronts)
            better = reach > at[begin]
            np.maximum.at(further, end[better], reach[better])
            furthest = better & (reach == further[end])
            np.minimum.at(lengths, end[furthest], length[furthest])  # of equals the shortest
            ways.append((at, lengths))
            at = further
        total = fronts if self.is_v else fronts + len(self.back)
        complete = np.flatnonzero((at >= 0) & (at + ends >= total))
        return self._back(int(complete[0]), at, ways) if complete.size else None

    def _back(self, end: int, at: Counts, ways: list[tuple[Counts, Counts]]) -> Taken:
        """The blocks that each rank took on the way to `end`."""
        ends, count = [], int(at[end])
        for before, lengths in reversed(ways):
            length = int(lengths[end])
            end -= length
            ends.append((length, count - int(before[end])))
            count = int(before[end])
        return ends[::-1]

    def stage_of(self, taken: Taken) -> tuple[int, ...]:
        """The stage of each block."""
        fronts, backs = zip(*taken, strict=True)
        sizes = (*fronts, *(reversed(backs) if self.is_v else backs))
        return tuple(j for j, size in enumerate(sizes) for _ in range(size))


def _sums(values: Sequence[int], side: range) -> Counts:
    """Sums of the values of the first 0, 1, 2, ... blocks of a side."""
    return np.cumsum([0, *(values[i] for i in side)], dtype=np.int64)
