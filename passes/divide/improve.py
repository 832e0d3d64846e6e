"""Several stages per rank: good runs, found by moving the cuts between them.

The loads of a rank's stages add up, so the dynamic programme, which sees one stage after another,
only gives a start. Then one or several neighbouring cuts move by one block each:

    before   | a b c | d e f | g h i |      the block d goes to the first stage and g to the
    after    | a b c d | e f g | h i |      second: the third is relieved by the first

as long as this lowers a measure, first of what is above the limits, then of the objective. At last
a dynamic programme places the cuts of two laps anew (`pairs`): of 128 layers that all differ, on 16
ranks with two stages each, the slowest takes 5.6 % less with it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from parcompiler.passes.divide.data import Flow, Load
from parcompiler.passes.divide.ledger import DivisionCosts
from parcompiler.passes.divide.move_delta import MoveDelta, move_deltas
from parcompiler.passes.divide.pairs import tighten
from parcompiler.passes.divide.runs import (
    BlockRun,
    all_runs,
    best_runs,
    ends_within,
    generous,
    snug,
)
from parcompiler.passes.divide.task import DivisionTask

Measure = Callable[[DivisionCosts], tuple[float, ...]]
DeltaMeasure = Callable[
    [DivisionCosts | MoveDelta], tuple[float, ...]
]  # a measure that move deltas suffice for
SWEEPS = 60  # over all cuts; a dozen is usual


def balanced_runs(task: DivisionTask, least: int) -> tuple[tuple[int, ...] | None, float]:
    """A good division into runs, and its objective in units; none when none found fits.

    `least` are units that the slowest rank takes at least.
    """
    runs = all_runs(task)
    for start in (even_runs, lean_runs):
        book = DivisionCosts(task, start(task))
        descend(book, overload := partial(_overload, least=least), overload)
        descend(book, _step, _step)
        if max(book.busy) > least and tighten(book, runs, least):
            descend(book, _step, _step)
        if not book.excess():
            return tuple(book.at), book.objective()
    return None, math.inf


def slimmed(task: DivisionTask, stage_of: tuple[int, ...]) -> tuple[int, ...]:
    """The runs after moves that lower the largest share of a memory limit."""
    room = [max(1, limit) for limit in task.room]

    def share(book: DivisionCosts) -> tuple[float, ...]:
        return tuple(
            sorted((book.memory(rank) / size for rank, size in enumerate(room)), reverse=True)
        )

    book = DivisionCosts(task, stage_of)
    descend(book, share)
    return tuple(book.at)


def _overload(book: DivisionCosts | MoveDelta, least: int) -> tuple[float, ...]:
    """Memory above the limits, then squared seconds above `least`, then unevenness."""
    above = sum((units - least) ** 2 for units in book.busy if units > least)
    return book.excess(), above, book.squares()


def _step(book: DivisionCosts | MoveDelta) -> tuple[float, ...]:
    """Memory above the limits, then the step, then unevenness."""
    return book.excess(), book.objective(), book.squares()


def even_runs(task: DivisionTask) -> tuple[int, ...]:
    """The runs whose seconds are most even, whatever their memory."""
    placement = tuple(task.placement)
    if task.is_uniform:  # then it is no matter which rank a stage is on
        placement = tuple(j % task.ranks for j in range(task.stages))
    bare = tuple(Load(load.seconds, 0, 0, by_rank=load.by_rank) for load in task.loads)
    return _even_runs(bare, tuple(task.flows), placement, task.microbatches)


@lru_cache(maxsize=64)  # schedules differ in what they hold, mostly
def _even_runs(
    loads: tuple[Load, ...], flows: tuple[Flow, ...], placement: tuple[int, ...], microbatches: int
) -> tuple[int, ...]:
    """The same, of blocks without bytes."""
    ranks = max(placement) + 1
    held = [[(1,) * (len(placement) // ranks)]] * ranks
    task = DivisionTask(loads, flows, placement, microbatches, held, [math.inf] * ranks)
    runs = all_runs(task)
    for most in (snug(task), generous(task), math.inf):

        def weigh(j: int, run: BlockRun, most: float = most) -> float | None:
            units = run.on(task.placement[j])
            return units if units <= most else None

        ends = ends_within(task.compute, task.stages, most)
        found = best_runs(task.stages, runs, weigh, lambda label: (label.squares,), ends)
        if found is not None:
            return found[0]
    raise AssertionError  # there are enough blocks


def lean_runs(task: DivisionTask) -> tuple[int, ...]:
    """The runs whose largest share of a limit is smallest; the start for little memory."""
    runs = all_runs(task)
    room = [max(1, task.room[rank]) for rank in task.placement]
    factor = task.in_flight
    # No longer runs need be tried than some division has: that of even lengths.
    blocks, stages = len(task.loads), task.stages
    evenly = [blocks * (j + 1) // stages for j in range(stages)]
    even = zip([0, *evenly], evenly, strict=False)
    most = max(
        (runs[a][b - a - 1].fixed + factor[j] * runs[a][b - a - 1].scaled) / room[j]
        for j, (a, b) in enumerate(even)
    )

    def share(j: int, run: BlockRun) -> float | None:
        part = (run.fixed + factor[j] * run.scaled) / room[j]
        return part if part <= most else None

    ends = ends_within([load.resident for load in task.loads], stages, most * max(room))
    found = best_runs(stages, runs, share, lambda label: (label.largest,), ends)
    assert found is not None  # there are enough blocks, and those of even lengths fit
    return found[0]


def descend(
    book: DivisionCosts, measure: Measure, delta_measure: DeltaMeasure | None = None
) -> None:
    """Move cuts until the measure falls no further.

    `delta_measure` is the measure if move deltas suffice for it: then, as a rule, only moves that
    lower it are made.
    """
    if not book.task.is_chain:
        delta_measure = None
    best = measure(book)
    for _ in range(SWEEPS):
        before = best
        for j in range(1, book.task.stages):
            best = _shift(book, range(j, book.task.stages), 0, best, measure, delta_measure)
            best = _shift(book, range(j, 0, -1), 1, best, measure, delta_measure)
        if best == before:
            return


def _shift(
    book: DivisionCosts,
    cuts: Sequence[int],
    side: int,
    best: tuple[float, ...],
    measure: Measure,
    delta_measure: DeltaMeasure | None,
) -> tuple[float, ...]:
    """Move the first few of these cuts, as many as is best, by a block; the measure then.

    With side 0 the block behind cut j goes to the stage before it, j - 1; with side 1 the block
    before it goes to the stage behind it, j.
    """
    if delta_measure is not None and all(
        delta_measure(seen) >= best for seen in move_deltas(book, cuts, side)
    ):
        return best
    moved: list[tuple[int, int]] = []  # blocks and their stages before
    kept = 0
    for j in cuts:
        i = bisect.bisect_left(book.at, j) - side
        moved.append((i, book.at[i]))
        book.move(i, j - 1 + side)
        emptied = moved[-1][1]
        neighbour = i + 1 if side == 0 else i - 1
        if 0 <= neighbour < len(book.at) and book.at[neighbour] == emptied:
            found = measure(book)
            if found < best:
                best, kept = found, len(moved)
    while len(moved) > kept:
        book.move(*moved.pop())
    return best
