"""Divide the blocks of a graph into pipeline stages: exactly, as an integer programme.

Given       c[i]        seconds of block i, forward and backward of one micro-batch; blocks are
                        listed in topological order
            m[i], s[i]  its resident bytes; its bytes saved for the backward, per micro-batch
            f           values that cross blocks: producer p, consumers q, seconds d[f] to receive
                        one and to return its gradient, bytes s[f] of the received copy
            g           tensors that several blocks use, of b[g] bytes
            M, k[j], L[j]   micro-batches; those in flight on stage j; its memory limit in bytes
Decide      y[i,j]      1 iff block i is on stage j or a later one
            x[i,j]      1 iff block i is on stage j: y[i,j] - y[i,j+1]             `_place`
            r[f,j]      1 iff value f is received on stage j
            u[g,j]      1 iff tensor g is held on stage j
            T           seconds of the slowest stage
Minimize    sum over j of t[j] + (M - 1) T                                         `minimize_time`
            with t[j] = sum(c[i] x[i,j]) + sum(d[f] r[f,j])
Subject to  data flows forward         y[p,j] <= y[q,j]                            `_flow_forward`
            no stage is empty          sum(x[i,j]) >= 1                            `_fill_stages`
            values are received        x[q,j] - x[p,j] <= r[f,j] <= sum(x[q,j])    `_receive_values`
            shared tensors are held    u[g,j] >= x[i,j] for each user i            `_hold_shared`
            no stage is slower than T  t[j] <= T                                   `minimize_time`
            memory suffices            sum(m[i] x[i,j]) + sum(b[g] u[g,j])         `limit_memory`
                                       + k[j] (sum(s[i] x[i,j]) + sum(s[f] r[f,j])) <= L[j]

Little of the proof needs search. A dynamic programme finds a good division into runs of consecutive
blocks. Every better division has each block on one of a few stages, its window; often the windows
contradict each other, and the runs are optimal. Else the programme is solved inside the windows.

Bytes are exact; the rounding of seconds to whole numbers is below 1e-9 of the slowest stage.

Ties: the runs found win when nothing is strictly better. Of runs with that slowest stage, they have
the least total, then the least sum of squared seconds (the most even), then the earliest cuts.
Where runs are not optimal, the solver's fixed seed decides.
"""

from __future__ import annotations

from collections.abc import Sequence

from parcompiler.errors import InfeasibleError
from parcompiler.passes.divide.data import (
    Division,
    Evaluation,
    Flow,
    Load,
    Part,
    Task,
    check_task,
    evaluate,
    memory_parts,
)
from parcompiler.passes.divide.programme import lay_out, limit_memory, minimize_time
from parcompiler.passes.divide.refusal import too_little_memory
from parcompiler.passes.divide.runs import fastest_runs, nothing_better
from parcompiler.passes.divide.windows import find_windows
from parcompiler.solver import EFFORT, UndecidedError, relative_gap, solve

__all__ = ["Division", "Evaluation", "Flow", "Load", "Part", "divide", "evaluate", "memory_parts"]


def divide(
    loads: Sequence[Load],
    flows: Sequence[Flow],
    stages: int,
    microbatches: int,
    in_flight: Sequence[int],
    limits: Sequence[float],
    *,
    names: Sequence[str] = (),
    effort: float = EFFORT,
) -> Division:
    """The division of blocks into stages whose step takes the fewest seconds.

    Args:
        loads: one per block, in topological order.
        flows: the values between blocks; producers come before consumers.
        stages: how many there are; none stays empty.
        microbatches: those of a step.
        in_flight: per stage, the micro-batches whose saved values it holds at once.
        limits: bytes of memory of each stage; may be infinite.
        names: of the blocks, for messages.
        effort: limit of the search, in the solver's deterministic units.

    Raises:
        InfeasibleError: more stages than blocks, or too little memory. Says the least limit that
            would do, and what takes most of it.
        UndecidedError: the search ended with no division and no proof that there is none.
        InputError: the data are no such problem.
    """
    task = Task(loads, flows, stages, microbatches, in_flight, limits)
    check_task(task)
    try:
        stage_of, bound = _fastest(task, effort)
    except InfeasibleError:
        raise too_little_memory(task, names, effort) from None
    objective = evaluate(loads, flows, stage_of, microbatches, in_flight).objective
    if bound is None:
        return Division(stage_of, "optimal", objective, objective, 0.0)
    least = min(objective, bound * task.unit)
    return Division(stage_of, "feasible", objective, least, relative_gap(objective, least))


def _fastest(task: Task, effort: float) -> tuple[tuple[int, ...], float | None]:
    """The best division; and a lower bound of the objective in units, None when it is optimal."""
    runs, best = fastest_runs(task)
    windows = find_windows(task, best)
    if windows is None:
        return nothing_better(runs), None
    layout = lay_out(task, windows)
    limit_memory(layout)
    minimize_time(layout)
    try:
        solution = solve(layout.model, effort=effort)
    except InfeasibleError:
        return nothing_better(runs), None
    except UndecidedError as undecided:
        if runs is None:
            raise
        return runs, min(best, undecided.bound)
    is_proven = solution.status == "optimal" or solution.bound >= best
    stage_of = runs if runs and best <= solution.objective else layout.read(solution.values)
    return stage_of, None if is_proven else solution.bound
