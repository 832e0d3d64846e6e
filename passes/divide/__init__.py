"""Divide the blocks of a graph into pipeline stages, and choose the blocks that run twice.

Given       c[i,r]      seconds of block i on rank r, forward and backward of one micro-batch;
                        blocks are listed in topological order
            m[i], s[i]  its resident bytes; its bytes saved for the backward, per micro-batch
            e[i]        further bytes that it takes only while it computes
            c', m', s', e'  the same numbers of block i when it runs twice, if it may
            f           values that cross blocks: producer p, consumers q, seconds d[f] to receive
                        one and to return its gradient, bytes s[f] of a received copy
            g           tensors that several blocks use, of b[g] bytes
            J(r)        stages of rank r, v of them on each
            M, L[r]     micro-batches; memory limit of rank r in bytes
            K(r)        vectors k of micro-batches in flight at once on the stages of rank r
Decide      y[i,j]      1 iff block i is on stage j or a later one
            x[i,j]      1 iff block i is on stage j: y[i,j] - y[i,j+1]             `_place`
            w[i,j]      1 iff it runs twice there: w[i,j] <= x[i,j]                `_place`
            r[f,j]      1 iff value f is received on stage j: the first of its rank to consume it
            u[g,r]      1 iff tensor g is held on rank r
            a[r]        bytes that rank r takes while it computes a block
            T           seconds of the slowest rank
Minimize    (sum over j of t[j]) / v + (M - 1) T                                   `_minimize_time`
            with t[j] = sum(c[i,r] x[i,j]) + sum(d[f] r[f,j]) for j in J(r)
Subject to  data flows forward         y[p,j] <= y[q,j]                            `_flow_forward`
            no stage is empty          sum(x[i,j]) >= 1                            `_fill_stages`
            values are received        x[q,j] - x[p,j] <= r[f,j] <= sum(x[q,j])    `_receive_values`
            shared tensors are held    u[g,r] >= x[i,j] for each user i            `_hold_shared`
            blocks can compute         a[r] >= e[i] x[i,j]                         `_hold_moment`
            no rank is slower than T   sum(t[j] for j in J(r)) <= T                `_minimize_time`
            memory suffices            sum(m[i] x[i,j]) + sum(b[g] u[g,r])         `_limit_memory`
                                       + a[r] + sum(k[j] s[i] x[i,j])
                                       + sum((k[j] + 1) s[f] r[f,j]) <= L[r]
                                       for each k in K(r), the sums over j in J(r)
In each sum, w[i,j] adds the numbers of block i run twice less those of block i run once.

A rank has one copy of a received value for each micro-batch in flight on its first stage that
consumes it, which has it longest, and one more, because a receive is posted before its use. Between
stages of one rank a value takes neither seconds nor a copy.

With one stage per rank a dynamic programme finds the best runs of consecutive blocks (`runs`). If
every block reads from the one before it, all divisions are runs, so the best runs are optimal. Else
the integer programme (`programme`) searches for a better division, with few stages left for each
block. With several stages per rank, runs are improved by moving cuts (`improve`); with two stages
another dynamic programme minimises the seconds of the slowest rank (`pairs`). The cheapest blocks
of each rank run twice (`twice.spared`), and the gap to the lower bound is reported. The stage pass
then moves blocks on the timeline: that finds shorter steps in less time than the integer programme.

Bytes are exact; the rounding of seconds to whole numbers is below 1e-9 of the slowest stage.

Ties: nothing runs twice where that is as good, and the runs win unless something is strictly
better. Of runs with one stage per rank, those with the least sum of squared seconds (the most even)
win, then those with the earliest cuts. Where runs are not optimal, the solver's fixed seed decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from parcompiler.errors import InfeasibleError
from parcompiler.passes.divide.data import (
    Evaluation,
    Flow,
    Load,
    MemoryPart,
    StageDivision,
    evaluate,
    memory_parts,
)
from parcompiler.passes.divide.improve import moved_runs
from parcompiler.passes.divide.programme import searched
from parcompiler.passes.divide.refusal import too_little_memory
from parcompiler.passes.divide.runs import StagesTwice, fastest_runs
from parcompiler.passes.divide.task import DivisionTask, check_count, check_task
from parcompiler.passes.divide.twice import spared
from parcompiler.solver import EFFORT, relative_gap

KEPT = 5  # good runs that the timeline compares where memory is ample

__all__ = [
    "DivisionTask", "Evaluation", "Flow", "Load", "MemoryPart", "StageDivision",
    "check_count", "divide", "evaluate", "memory_parts", "spared",
]  # fmt: skip


def divide(
    task: DivisionTask,
    *,
    names: Sequence[str] = (),
    effort: float = EFFORT,
    explain: bool = True,
    besides: Sequence[int] = (),
    memory: Sequence[int] = (),
) -> StageDivision:
    """The division of blocks into stages whose step takes the fewest seconds.

    Args:
        task: what is to be divided.
        names: of the blocks, for messages.
        effort: limit of the search, in the solver's deterministic units.
        explain: whether the error says how much memory would suffice.
        besides: bytes of each rank that are in use otherwise; the message adds them.
        memory: bytes of each rank, including those in use otherwise, for the message.

    Raises:
        InfeasibleError: more stages than blocks, or too little memory. Says the least limit that
            would do, and what takes most of it.
        UndecidedError: the search ended with no division and no proof that there is none.
        InputError: the data describe no such problem.
    """
    check_task(task)
    others: list[tuple[int, ...]] = []
    least: float | None = None
    if task.each > 1:
        best, least = _several_stages_each(task, others), 0.0
    else:
        runs = fastest_runs(task)
        best = runs and runs[0]
        others += [best[0]] if best else []
        if not task.is_linked:
            best, least = searched(task, runs, effort)
    if best is None:
        if not explain:
            message = "no division satisfies the limits, whatever runs twice"
            raise InfeasibleError(message)
        raise too_little_memory(task, names, besides, memory)
    stage_of, twice = best
    seconds = task.evaluate(stage_of, twice).objective
    bound = seconds
    if least is not None:
        units = max(least, sum(task.compute) + task.further * task.even)
        bound = min(seconds, units * task.unit / task.each)
    gap = relative_gap(seconds, bound)
    status = "feasible" if gap else "optimal"
    tried = tuple(dict.fromkeys(item for item in others if item != stage_of))
    return StageDivision(stage_of, status, seconds, bound, gap, tried, twice)


def _several_stages_each(task: DivisionTask, tried: list[tuple[int, ...]]) -> StagesTwice | None:
    """The best of some good runs, and the blocks that must run twice in it; adds all to `tried`."""
    inputs = tuple(task.loads), tuple(task.flows), tuple(task.placement), task.microbatches
    free = _unlimited(*inputs)
    best = sorted(free, key=lambda stage_of: task.objective(stage_of, ()))[:KEPT]
    if task.fits(best[0]):
        tried += best
        return best[0], frozenset()
    tried.append(free[0])
    every = [i for i, twice in enumerate(task.again) if twice is not None]
    for lean in (task, task.under(every)) if every else (task,):
        tried += moved_runs(lean)
    divisions = []
    for stage_of in dict.fromkeys(tried):
        twice = spared(task, stage_of)
        if twice is not None:
            divisions.append((task.objective(stage_of, twice), len(twice), (stage_of, twice)))
    return min(divisions)[2] if divisions else None


@lru_cache(maxsize=64)  # schedules with one placement differ only in what they hold
def _unlimited(
    loads: tuple[Load, ...],
    flows: tuple[Flow, ...],
    placement: tuple[int, ...],
    microbatches: int,
) -> list[tuple[int, ...]]:
    """Good runs with unlimited memory."""
    ranks = max(placement) + 1
    held = [((1,) * (len(placement) // ranks),)] * ranks
    return moved_runs(DivisionTask(loads, flows, placement, microbatches, held, [math.inf] * ranks))
