"""Divide the blocks of a graph into pipeline stages: exactly, as an integer programme.

Given       c[i,r]      seconds of block i on rank r, forward and backward of one micro-batch;
                        blocks are listed in topological order
            m[i], s[i]  its resident bytes; its bytes saved for the backward, per micro-batch
            e[i]        bytes that it takes while it computes only
            f           values that cross blocks: producer p, consumers q, seconds d[f] to receive
                        one and to return its gradient, bytes s[f] of a received copy
            g           tensors that several blocks use, of b[g] bytes
            J(r)        stages of rank r, v of them on each
            M, L[r]     micro-batches; memory limit of rank r in bytes
            K(r)        vectors k of micro-batches in flight at once on the stages of rank r
Decide      y[i,j]      1 iff block i is on stage j or a later one
            x[i,j]      1 iff block i is on stage j: y[i,j] - y[i,j+1]             `_place`
            r[f,j]      1 iff value f is received on stage j: the first of its rank to consume it
            u[g,r]      1 iff tensor g is held on rank r
            a[r]        bytes that rank r takes while it computes a block
            T           seconds of the slowest rank
Minimize    (sum over j of t[j]) / v + (M - 1) T                                   `minimize_time`
            with t[j] = sum(c[i,r] x[i,j]) + sum(d[f] r[f,j]) for j in J(r)
Subject to  data flows forward         y[p,j] <= y[q,j]                            `_flow_forward`
            no stage is empty          sum(x[i,j]) >= 1                            `_fill_stages`
            values are received        x[q,j] - sum(x[p,e] + r[f,e] for other      `_receive_values`
                                       e in J(r), of the r[f,e] those before j)
                                       - x[p,j] <= r[f,j] <= sum(x[q,j])
            shared tensors are held    u[g,r] >= x[i,j] for each user i            `_hold_shared`
            blocks can compute         a[r] >= e[i] x[i,j]                         `_hold_moments`
            no rank is slower than T   sum(t[j] for j in J(r)) <= T                `minimize_time`
            memory suffices            sum(m[i] x[i,j]) + sum(b[g] u[g,r])         `limit_memory`
                                       + a[r] + sum(k[j] s[i] x[i,j])
                                       + sum((k[j] + 1) s[f] r[f,j]) <= L[r]
                                       for each k in K(r), the sums over j in J(r)

The sum over r[f,e] makes a value received once per rank. Its copies are those of the micro-batches
in flight on the first stage that consumes it, which has it longest, and one more, because a receive
is posted before its use. Between stages of one rank it takes neither seconds nor a copy.

Little of the proof needs search. With one stage per rank, a dynamic programme finds a good division
into runs of consecutive blocks; with several, runs become good by moving cuts (`improve`, `pairs`).
Every better division has each block on one of a few stages, its window; often the windows
contradict each other, or the blocks do not fit into the ranks however they are put (`bounds`), and
the runs are optimal. Else the programme is solved inside the windows; but with several stages per
rank only a small one: there the gap is told, and the stage pass improves the runs on the timeline.

Where ranks differ in speed, a bound that counts a block where it takes least is weak. A chain with
one stage per rank is then divided by the exact dynamic programme of `spans`.

Bytes are exact; the rounding of seconds to whole numbers is below 1e-9 of the slowest stage.

Ties: the runs found win when nothing is strictly better. With one stage per rank, of runs with that
slowest stage they have the least total, then the least sum of squared seconds (the most even), then
the earliest cuts. With several, no move of neighbouring cuts by one block lowers the sum of squares
at the same step. Where runs are not optimal, the solver's fixed seed decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from parcompiler.errors import InfeasibleError
from parcompiler.passes.divide.again import Repeatable
from parcompiler.passes.divide.bounds import crowded, least_slowest
from parcompiler.passes.divide.data import (
    Evaluation,
    Flow,
    Load,
    MemoryPart,
    StageDivision,
    evaluate,
    memory_parts,
)
from parcompiler.passes.divide.improve import balanced_runs
from parcompiler.passes.divide.programme import is_large, lay_out, limit_memory, minimize_time
from parcompiler.passes.divide.refusal import too_little_memory
from parcompiler.passes.divide.runs import fastest_runs, nothing_better
from parcompiler.passes.divide.spans import Spans
from parcompiler.passes.divide.task import DivisionTask, check_task
from parcompiler.passes.divide.windows import find_windows
from parcompiler.solver import EFFORT, UndecidedError, relative_gap, solve

SHORTER = 0.2  # of the effort, where there is a division to begin with that is rarely improved

__all__ = [
    "Evaluation", "Flow", "Load", "MemoryPart", "StageDivision", "divide", "evaluate",
    "memory_parts",
]  # fmt: skip


def divide(
    loads: Sequence[Load],
    flows: Sequence[Flow],
    placement: Sequence[int],
    microbatches: int,
    held: Sequence[Sequence[tuple[int, ...]]],
    limits: Sequence[float],
    *,
    names: Sequence[str] = (),
    effort: float = EFFORT,
    explain: bool = True,
    besides: Sequence[int] = (),
    memory: Sequence[int] = (),
) -> StageDivision:
    """The division of blocks into stages whose step takes the fewest seconds.

    Args:
        loads: one per block, in topological order.
        flows: the values between blocks; producers come before consumers.
        placement: the rank of each stage; no stage stays empty, each rank has equally many.
        microbatches: those of a step.
        held: per rank, how many micro-batches' saved values its stages hold at once: one vector
            for each moment that may be the fullest, one count for each of its stages.
        limits: bytes of memory of each rank; may be infinite.
        names: of the blocks, for messages.
        effort: limit of the search, in the solver's deterministic units.
        explain: whether to search for what would do when memory does not (that may take longer).
        besides: bytes that each rank has in use besides; the message adds them.
        memory: bytes of each rank, the ones in use among them, for the message.

    Raises:
        InfeasibleError: more stages than blocks, or too little memory. Says the least limit that
            would do, and what takes most of it.
        UndecidedError: the search ended with no division and no proof that there is none.
        InputError: the data are no such problem.
    """
    task = DivisionTask(loads, flows, placement, microbatches, held, limits)
    check_task(task)
    try:
        stage_of, bound, runs = _fastest(task, effort)
    except InfeasibleError:
        if not explain:
            raise
        raise too_little_memory(task, names, effort, besides, memory) from None
    objective = task.evaluate(stage_of).objective
    others = () if runs in (None, stage_of) else (runs,)
    if bound is None:
        return StageDivision(stage_of, "optimal", objective, objective, 0.0, others)
    least = min(objective, bound * task.unit / task.each)
    gap = relative_gap(objective, least)
    return StageDivision(stage_of, "feasible", objective, least, gap, others)


def _fastest(
    task: DivisionTask, effort: float
) -> tuple[tuple[int, ...], float | None, tuple[int, ...] | None]:
    """The best division; a lower bound of the objective in units, None when it is optimal; and the
    runs that the search began with."""
    if crowded(task) or find_windows(task, math.inf) is None:  # look for no good division then
        return nothing_better(None), None, None
    least = least_slowest(task) if task.each > 1 else 0
    runs, best = balanced_runs(task, least) if task.each > 1 else fastest_runs(task)
    if not task.is_uniform and task.each == 1 and task.links is not None:
        better = Spans(Repeatable(task, (None,) * len(task.loads))).best(best)
        return (nothing_better(runs) if better is None else better[0]), None, runs
    windows = find_windows(task, best)
    if windows is None or windows.slowest < least:
        return nothing_better(runs), None, runs
    bound = sum(task.compute) + sum(windows.received) + task.further * least
    if runs is not None and is_large(task, windows):
        return runs, bound, runs
    layout = lay_out(task, windows)
    limit_memory(layout)
    minimize_time(layout, least)
    if runs is not None and task.each > 1:
        layout.hint(runs)
        if layout.is_large:
            return runs, bound, runs
        effort *= SHORTER
    try:
        solution = solve(layout.model, effort=effort)
    except InfeasibleError:
        return nothing_better(runs), None, runs
    except UndecidedError as undecided:
        if runs is None:
            raise
        return runs, min(best, undecided.bound), runs
    is_proven = solution.status == "optimal" or solution.bound >= best
    stage_of = runs if runs and best <= solution.objective else layout.read(solution.values)
    return stage_of, None if is_proven else solution.bound, runs
