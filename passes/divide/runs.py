"""The best division into runs of consecutive blocks: dynamic programmes over their ends.

    blocks   | a b c | d e | f g h |      the labels at f are the best ways to divide a ... e into
    stages       0      1      2          two stages; each is extended by every run that fits

A run costs its seconds, and those of the cheapest blocks to run twice so that it fits (`twice`). Of
the labels of equal blocks on equal stages, those are kept that no other dominates (in the sum and
in the slowest stage), and whose lower bound is below the best division known. So the division is
optimal for one stage per rank if every block reads from the one before it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from parcompiler.passes.divide.data import Flow, Load
from parcompiler.passes.divide.task import DivisionTask
from parcompiler.passes.divide.twice import Choice, cheapest_of

StagesTwice = tuple[tuple[int, ...], frozenset[int]]
"""The stage of each block, and the blocks that run twice."""


class BlockRun(NamedTuple):
    """Consecutive blocks as one stage: `moved` units of time to receive values from outside, bytes
    resident + in_flight * saved, and the most bytes (`moment`) of a block while it computes."""

    moved: int = 0
    resident: int = 0
    saved: int = 0
    moment: int = 0

    def memory(self, in_flight: int) -> int:
        """Bytes with `in_flight` micro-batches."""
        return self.resident + in_flight * self.saved + self.moment


class BlockRuns:
    """The runs of a task, computed on request."""

    def __init__(self, task: DivisionTask) -> None:
        self._task = task
        self._known: list[list[BlockRun]] = [[] for _ in task.loads]
        sums = [list(itertools.accumulate(costs, initial=0)) for costs in task.cost[: task.ranks]]
        self._sums = [sums[rank] for rank in task.placement]
        # By block, the values that it reads, each with the block that made or read it before: a
        # run that begins after that one receives the value here.
        self._read: list[list[tuple[int, int, int]]] = [[] for _ in task.loads]
        for flow, units in zip(task.flows, task.move, strict=True):
            for before, q in itertools.pairwise((flow.producer, *sorted(flow.consumers))):
                self._read[q].append((before, units, flow.saved))
        self._shared: list[list[tuple[int, int]]] = [[] for _ in task.loads]
        last: dict[tuple[str, int], int] = {}
        for i, load in enumerate(task.loads):
            for item in set(load.shared):
                self._shared[i].append((last.get(item, -1), item[1]))
                last[item] = i

    def __call__(self, a: int, b: int) -> BlockRun:
        """The run of blocks a to b - 1."""
        known = self._known[a]
        while len(known) < b - a:
            i, run = a + len(known), known[-1] if known else BlockRun()
            load = self._task.loads[i]
            received = [(units, size) for before, units, size in self._read[i] if before < a]
            copies = sum(size for _, size in received)
            shared = sum(size for before, size in self._shared[i] if before < a)
            known.append(
                BlockRun(
                    run.moved + sum(units for units, _ in received),
                    run.resident + load.resident + copies + shared,
                    run.saved + load.saved + copies,
                    max(run.moment, load.moment),
                )
            )
        return known[b - a - 1]

    def seconds(self, j: int, a: int, b: int) -> int:
        """Units of blocks a to b - 1 on stage j, if none runs twice."""
        return self._sums[j][b] - self._sums[j][a] + self(a, b).moved


class _Label(NamedTuple):
    """The first `end` blocks, divided into stages: the sum of the stages' weights, the largest, and
    the sum of their squares."""

    total: float
    largest: float
    squares: float
    end: int
    before: _Label | None = None


# (stage, begin, end) -> weight of a run; None: too much
Weigh = Callable[[int, int, int], float | None]


def _labels(
    task: DivisionTask,
    weigh: Weigh,
    keep: Callable[[list[_Label]], list[_Label]],
    is_good: Callable[[_Label, int], bool] = lambda label, j: True,
    lows: Sequence[int] = (),
) -> list[_Label]:
    """The labels of all blocks on all stages. Where a run weighs too much, no longer one is tried.
    `keep` selects among the labels with one end, `is_good` says whether a label with stages up to j
    may become the best, `lows` are lower bounds on the ends of stages."""
    blocks, best = len(task.loads), {0: [_Label(0, 0, 0, 0)]}
    for j in range(task.stages):
        reached: dict[int, list[_Label]] = {}
        behind = task.stages - 1 - j
        for a, labels in best.items():
            for b in range(max(a + 1, lows[j] if lows else 0), blocks - behind + 1):
                weight = weigh(j, a, b)
                if weight is None:
                    break
                if behind or b == blocks:
                    longer = (
                        _Label(
                            x.total + weight, max(x.largest, weight), x.squares + weight**2, b, x
                        )
                        for x in labels
                    )
                    reached.setdefault(b, []).extend(x for x in longer if is_good(x, j))
        best = {b: keep(candidates) for b, candidates in reached.items() if candidates}
    return best.get(blocks, [])


def _ends(label: _Label) -> list[int]:
    """Where each stage ends."""
    ends = []
    at: _Label | None = label
    while at is not None and at.before is not None:
        ends.append(at.end)
        at = at.before
    return ends[::-1]


def _stage_of(ends: Sequence[int]) -> tuple[int, ...]:
    """The stage of each block.

    >>> _stage_of([2, 3])
    (0, 0, 1)
    """
    sizes = (b - a for a, b in itertools.pairwise([0, *ends]))
    return tuple(j for j, size in enumerate(sizes) for _ in range(size))


def fastest_runs(task: DivisionTask) -> tuple[StagesTwice, int] | None:
    """The fastest runs of a task with one stage per rank, the blocks that run twice in them, and
    the units of the step; None when none fit. Of equals, the runs with the most even stages."""
    runs, further = BlockRuns(task), task.further
    known: dict[tuple[object, ...], Choice | None] = {}
    rest, slowest = _bounds_of_rest(task)

    def choice(j: int, a: int, b: int) -> Choice | None:
        run, rank = runs(a, b), task.placement[j]
        over = run.memory(task.in_flight[j]) - task.room[rank]
        if over <= 0:
            return Choice(0, ())
        if not task.again:
            return None
        kinds = tuple(sorted(Counter(task.kind_of[a:b]).items()))
        key = kinds, over, task.in_flight[j], 0 if task.is_uniform else rank
        if key not in known:
            groups = [(kind, count, [task.in_flight[j]]) for kind, count in kinds]
            known[key] = cheapest_of(task, rank, groups, [over - run.moment])
        return known[key]

    def units_of(label: _Label) -> float:
        return label.total + further * label.largest

    def search(below: float, cap: float, *, one: bool) -> list[_Label]:
        def weigh(j: int, a: int, b: int) -> float | None:
            units = runs.seconds(j, a, b)
            twice = choice(j, a, b) if units <= cap else None
            return None if twice is None or units + twice.seconds > cap else units + twice.seconds

        def is_good(x: _Label, j: int) -> bool:
            most = max(x.largest, slowest[j][x.end])
            return x.total + rest[j][x.end] + further * most < below

        def best(labels: list[_Label]) -> list[_Label]:
            return [min(labels, key=lambda x: (units_of(x), x.squares))]

        return _labels(task, weigh, best if one else _unbeaten, is_good, _lows(slowest, cap))

    for cap in (snug(task), math.inf):
        if first := search(math.inf, cap, one=True):
            below = units_of(first[0]) + 1
            cap = (below - sum(task.compute)) // further if further else math.inf
            reached = [*first, *search(below, cap, one=False)]
            label = min(reached, key=lambda x: (units_of(x), x.squares, _ends(x)))
            ends = _ends(label)
            twice: set[int] = set()
            for j, (a, b) in enumerate(itertools.pairwise([0, *ends])):
                made, kinds = choice(j, a, b), sorted(set(task.kind_of[a:b]))
                assert made is not None
                for kind, count in zip(kinds, made.counts, strict=False):
                    twice.update([i for i in range(a, b) if task.kind_of[i] == kind][:count])
            return (_stage_of(ends), frozenset(twice)), int(units_of(label))
    return None


def _bounds_of_rest(task: DivisionTask) -> tuple[list[list[int]], list[list[int]]]:
    """Lower bounds by stage and block, for this and all later blocks on the stages after this one:
    the sum of their units, and the units of the slowest rank."""
    rests, slowest = [], []
    for j in range(task.stages):
        ranks = task.placement[j + 1 :]
        least, pace = task.least_on(ranks), task.pace(ranks)
        rests.append([*itertools.accumulate(reversed(least), initial=0)][::-1])
        slowest.append([int(-(-units // pace)) if pace else 0 for units in rests[-1]])
    return rests, slowest


def _lows(slowest: Sequence[Sequence[int]], cap: float) -> list[int]:
    """The least end of each stage if no later rank takes longer than `cap`."""
    return [bisect.bisect_left(sums, True, key=lambda units: units <= cap) for sums in slowest]


def _unbeaten(labels: list[_Label]) -> list[_Label]:
    """The labels that no other dominates in the sum and in the slowest stage."""
    unbeaten: list[_Label] = []
    for label in sorted(labels, key=lambda label: label[:3]):
        if not unbeaten or label.largest < unbeaten[-1].largest:
            unbeaten.append(label)
    return unbeaten


def snug(task: DivisionTask) -> int:
    """A cap on the units of a stage that even stages satisfy unless memory binds: tried first.

    With it the number of runs to look at is linear in the number of blocks, not quadratic.
    """
    costs = [task.compute] if task.is_uniform else task.cost
    average = sum(map(sum, costs)) // len(costs) // task.stages
    return average + max(map(max, costs)) + max(task.move, default=0)


def even_runs(task: DivisionTask) -> tuple[int, ...]:
    """The runs whose seconds are most even, with unlimited memory."""
    placement = tuple(task.placement)
    if task.is_uniform:  # then the rank of a stage does not matter
        placement = tuple(j % task.ranks for j in range(task.stages))
    bare = tuple(Load(load.seconds, 0, 0, by_rank=load.by_rank) for load in task.loads)
    return _even_runs(bare, tuple(task.flows), placement)


@lru_cache(maxsize=64)  # most schedules differ only in what they hold
def _even_runs(
    loads: tuple[Load, ...], flows: tuple[Flow, ...], placement: tuple[int, ...]
) -> tuple[int, ...]:
    """Uncached body of `even_runs`, of blocks without bytes."""
    task = DivisionTask(loads, flows, placement, 1, (), ())
    seconds, slowest = BlockRuns(task).seconds, _bounds_of_rest(task)[1]

    def search(cap: float) -> list[_Label]:
        def weigh(j: int, a: int, b: int) -> float | None:
            units = seconds(j, a, b)
            return units if units <= cap else None

        def most_even(labels: list[_Label]) -> list[_Label]:
            return [min(labels, key=lambda x: x.squares)]

        return _labels(task, weigh, most_even, lows=_lows(slowest, cap))

    return _stage_of(_ends((search(snug(task)) or search(math.inf))[0]))


def slowest_run(task: DivisionTask) -> int:
    """Lower bound on the units of the slowest stage, with one stage per rank and unlimited memory.

    >>> loads = [Load(seconds, 0, 0) for seconds in (1.0, 2.0, 1.0, 1.0, 2.0, 1.0)]
    >>> task = DivisionTask(loads, [], range(3), 1, [], [])
    >>> round(slowest_run(task) * task.unit)
    3
    """
    done = [*itertools.accumulate(task.compute, initial=0)]

    def fits(cap: int) -> bool:
        at = 0
        for _ in range(task.stages):
            at = bisect.bisect_right(done, done[at] + cap) - 1
        return at == len(task.loads)

    return bisect.bisect_left(range(done[-1]), True, lo=task.even, key=fits)


def lean_runs(task: DivisionTask) -> tuple[int, ...]:
    """The runs whose largest share of a memory limit is smallest."""
    runs, blocks, stages = BlockRuns(task), len(task.loads), task.stages

    def share(j: int, a: int, b: int) -> float:
        return runs(a, b).memory(task.in_flight[j]) / task.limits[task.placement[j]]

    evenly = [blocks * (j + 1) // stages for j in range(stages)]
    most = max(share(j, a, b) for j, (a, b) in enumerate(itertools.pairwise([0, *evenly])))

    def weigh(j: int, a: int, b: int) -> float | None:
        part = share(j, a, b)
        return part if part <= most else None

    best = _labels(task, weigh, lambda labels: [min(labels, key=lambda x: x.largest)])
    return _stage_of(_ends(best[0]))
