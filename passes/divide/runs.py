"""The best division into runs of consecutive blocks: a dynamic programme."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, overload

from parcompiler.errors import InfeasibleError
from parcompiler.passes.divide.task import DivisionTask


class BlockRun(NamedTuple):
    """Consecutive blocks as one stage: units of time, and bytes fixed + in_flight * scaled.

    All that comes from outside counts as received; what one block takes for a moment is fixed.
    `ranks` are the units on each rank where these differ, and `seconds` those where all is fastest.
    """

    seconds: int
    fixed: int
    scaled: int
    ranks: tuple[int, ...] = ()

    def on(self, rank: int) -> int:
        """Units on a rank."""
        return self.ranks[rank] if self.ranks else self.seconds


class _Label(NamedTuple):
    """The weights of the stages so far: their sum, the largest, and the sum of squares."""

    total: float
    largest: float
    squares: float


def fastest_runs(task: DivisionTask) -> tuple[tuple[int, ...] | None, float]:
    """A good division into runs, as even as its slowest stage allows; its objective in units."""

    def objective(label: _Label) -> float:
        return label.total + (task.microbatches - 1) * label.largest

    runs = all_runs(task)
    for cap in (snug(task), generous(task), math.inf):
        weigh, ends = _seconds(task, cap), ends_within(task.compute, task.stages, cap)
        found = best_runs(task.stages, runs, weigh, lambda label: (objective(label),), ends)
        if found is None or (cap < generous(task) and cap < _slowest(task, objective(found[1]))):
            continue
        cap = found[1].largest
        weigh, ends = _seconds(task, cap), ends_within(task.compute, task.stages, cap)
        even = best_runs(task.stages, runs, weigh, lambda label: (label.total, label.squares), ends)
        assert even is not None
        return even[0], objective(even[1])
    return None, math.inf


def snug(task: DivisionTask) -> int:
    """Units that the slowest stage of even ones needs, if memory does not bind: tried first.

    So the runs that are looked at grow with the number of blocks, and not with its square.
    """
    costs = [task.compute] if task.is_uniform else task.cost
    average = sum(map(sum, costs)) // len(costs) // task.stages
    return average + max(map(max, costs)) + max(task.move, default=0)


def _slowest(task: DivisionTask, objective: float) -> float:
    """Units that no stage is above in a division that is as good."""
    if task.microbatches == 1:
        return math.inf
    return (objective - sum(task.compute)) / (task.microbatches - 1)


def ends_within(weights: Sequence[int], stages: int, cap: float) -> list[range]:
    """How many blocks each stage and those before it may have, if none weighs more than `cap`.

    >>> ends_within([1, 1, 1, 1, 1, 1], stages=3, cap=2), ends_within([1, 1, 1], 2, math.inf)
    ([range(2, 3), range(4, 5), range(6, 7)], [range(1, 3), range(3, 4)])
    """
    blocks, sums = len(weights), list(itertools.accumulate(weights, initial=0))
    found = []
    for done in range(1, stages + 1):
        left = stages - done
        low = bisect.bisect_left(sums, sums[-1] - left * cap) if left else blocks
        high = bisect.bisect_right(sums, done * cap) - 1
        found.append(range(max(low, done), min(high, blocks - left) + 1))
    return found


def generous(task: DivisionTask) -> int:
    """Units of a stage that no good division is above, as a rule: longer runs are tried last."""
    costs = [task.compute] if task.is_uniform else task.cost
    average = sum(map(sum, costs)) // len(costs) // task.stages
    return 2 * average + max(map(max, costs)) + max(task.move, default=0)


def _seconds(task: DivisionTask, cap: float) -> Callable[[int, BlockRun], float | None]:
    """Units of time of a run on a stage, where they and its bytes are within the limits."""

    def weigh(j: int, run: BlockRun) -> float | None:
        fits = run.fixed + task.in_flight[j] * run.scaled <= task.room[task.placement[j]]
        return run.seconds if fits and run.seconds <= cap else None

    def by_rank(j: int, run: BlockRun) -> float | None:
        rank = task.placement[j]
        units, fits = run.on(rank), run.fixed + task.in_flight[j] * run.scaled <= task.room[rank]
        return units if fits and units <= cap else None

    return weigh if task.is_uniform else by_rank


class Longer(Sequence[BlockRun]):
    """The runs that begin with a block, each longer than the one before; found when asked for."""

    def __init__(self, task: DivisionTask, a: int) -> None:
        self._size = len(task.loads) - a
        self._known: list[BlockRun] = []
        self._more = _runs_from(task, a)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, n: int) -> BlockRun: ...
    @overload
    def __getitem__(self, n: slice) -> list[BlockRun]: ...
    def __getitem__(self, n: int | slice) -> BlockRun | list[BlockRun]:
        last = n.indices(self._size)[1] if isinstance(n, slice) else n
        self._find(last if last >= 0 else self._size)
        return self._known[n]

    def __iter__(self) -> Iterator[BlockRun]:
        yield from self._known
        for n in range(len(self._known), self._size):
            self._find(n)
            yield self._known[n]

    def _find(self, n: int) -> None:
        """Know the runs up to number n."""
        self._known += itertools.islice(self._more, max(0, n + 1 - len(self._known)))


def all_runs(task: DivisionTask) -> Sequence[Sequence[BlockRun]]:
    """`runs[a][n]` are the blocks a … a + n. Each number grows with n."""
    if task.is_uniform:
        return [Longer(task, a) for a in range(len(task.loads))]
    return [_by_rank(task, a, list(_runs_from(task, a))) for a in range(len(task.loads))]


def _by_rank(task: DivisionTask, a: int, runs: Sequence[BlockRun]) -> list[BlockRun]:
    """The runs that begin with block a, with their units on each rank."""
    sums = [list(itertools.accumulate(own[a:])) for own in (task.compute, *task.cost)]
    moved = [run.seconds - units for run, units in zip(runs, sums[0], strict=True)]
    return [
        run._replace(ranks=tuple(units + more for units in own))
        for run, more, *own in zip(runs, moved, *sums[1:], strict=True)
    ]


def _runs_from(task: DivisionTask, a: int) -> Iterator[BlockRun]:
    seconds = fixed = scaled = moment = 0
    received: set[int] = set()
    held: set[tuple[str, int]] = set()
    for i in range(a, len(task.loads)):
        load = task.loads[i]
        new = {f for f in task.arriving[i] if task.flows[f].producer < a} - received
        seconds += task.compute[i] + sum(task.move[f] for f in new)
        copies = sum(task.flows[f].saved for f in new)
        fixed += load.resident + sum(size for _, size in set(load.shared) - held) + copies
        scaled += load.saved + copies
        moment = max(moment, load.moment)
        received |= new
        held.update(load.shared)
        yield BlockRun(seconds, fixed + moment, scaled)


def best_runs(
    stages: int,
    runs: Sequence[Sequence[BlockRun]],
    weigh: Callable[[int, BlockRun], float | None],
    rank: Callable[[_Label], tuple[float, ...]],
    ends: Sequence[range] = (),
) -> tuple[tuple[int, ...], _Label] | None:
    """The division into so many runs whose label has the least rank: a dynamic programme.

    `weigh` says what a run weighs on a stage; None when it does not fit, as then no longer one
    does. Only the best label for the same blocks on the same stages is kept. `ends` are the numbers
    of blocks that may be on each stage and those before it; all where there are none.
    """
    best = {0: _Label(0, 0, 0)}  # by the number of blocks on the stages so far
    cuts: list[dict[int, int]] = []
    for j in range(stages):
        low, high = j + 1, len(runs) - (stages - 1 - j)
        if ends:
            low, high = ends[j].start, ends[j].stop - 1
        if j == stages - 1:  # nothing less is a division
            low = len(runs)
        reached: dict[int, _Label] = {}
        ranked: dict[int, tuple[float, ...]] = {}
        cut: dict[int, int] = {}
        for a, (total, largest, squares) in best.items():
            for b in range(max(a + 1, low), high + 1):
                weight = weigh(j, runs[a][b - a - 1])
                if weight is None:
                    break
                label = _Label(total + weight, max(largest, weight), squares + weight**2)
                found = rank(label)
                if b not in ranked or found < ranked[b]:
                    reached[b], ranked[b], cut[b] = label, found, a
        best = reached
        cuts.append(cut)
    if len(runs) not in best:
        return None
    stage_of: list[int] = []
    b = len(runs)
    for j in reversed(range(stages)):
        stage_of += [j] * (b - cuts[j][b])
        b = cuts[j][b]
    return tuple(reversed(stage_of)), best[len(runs)]


def nothing_better(runs: tuple[int, ...] | None) -> tuple[int, ...]:
    """There is nothing better than `runs`; and without those, nothing at all."""
    if runs is None:
        message = "no division satisfies the limits"
        raise InfeasibleError(message)
    return runs
