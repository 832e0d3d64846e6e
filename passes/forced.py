"""What is divided into stages: the blocks, and what they are where memory may have them recomputed.

A block that is recomputed keeps what it reads. Where it is the only one to keep that, the block
that made it keeps its output: that is counted in any case, and so never too little.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

from parcompiler.graph import nbytes_of
from parcompiler.passes.divide import DivisionTask, Flow, Load
from parcompiler.passes.loads import data_under, reserved
from parcompiler.passes.recompute import chosen
from parcompiler.plan import Plan
from parcompiler.problem import Problem
from parcompiler.schedules.planned import held, identity, outline


def division_task(
    problem: Problem,
    plan: Plan,
    level: int,
    limits: Sequence[int] | None = None,
    *,
    is_free: bool | None = None,
) -> DivisionTask:
    """The blocks at a granularity as they are divided under the schedule of a plan, where ranks
    have so many bytes for them (None: all but what is reserved).

    Where recomputation is free, left to memory (None: as in the options), any block may run twice;
    else those do that the plan recomputes. Found once for a schedule: who bounds it, divides it
    quickly and divides it well asks for it.
    """
    if limits is None:
        limits = [memory - reserved(problem, plan) for memory in problem.memories]
    if is_free is None:
        is_free = problem.options.recompute == "auto"
    rooms = tuple(float(max(1, limit)) for limit in limits)
    given = outline(plan).placement, plan.microbatches, held(plan), rooms
    if not is_free:
        loads, flows = data_under(problem, plan, level)
        return DivisionTask(loads, flows, *given)
    key = "division task", level, rooms, identity(plan)

    def find() -> DivisionTask:
        loads, again, flows = _free(problem, plan, level)
        return DivisionTask(loads, flows, *given, again)

    return problem.once(key, find)


def names_of(problem: Problem, level: int, blocks: Collection[int]) -> tuple[str, ...]:
    """The names of blocks, in their order."""
    names = [block.name for block in problem.priced(level).cut.blocks]
    return tuple(names[b] for b in sorted(blocks))


def _free(
    problem: Problem, plan: Plan, level: int
) -> tuple[tuple[Load, ...], tuple[Load | None, ...], tuple[Flow, ...]]:
    """The blocks as they are, and as they are when recomputed, None where that does not help; and
    the values between them."""
    every = chosen(problem, level, "full")
    loads, flows = data_under(problem, dataclasses.replace(plan, recompute=()), level)
    full, _ = data_under(problem, dataclasses.replace(plan, recompute=every), level)
    kept = tuple(_keeping(problem, level, every, loads))
    names = [block.name for block in problem.priced(level).cut.blocks]
    again = (
        other
        if name in every and (other.saved < load.saved or other.moment < load.moment)
        else None
        for name, load, other in zip(names, kept, full, strict=True)
    )
    return kept, tuple(again), flows


def _keeping(
    problem: Problem, level: int, every: Sequence[str], loads: Sequence[Load]
) -> Iterator[Load]:
    """The blocks as they are, their outputs kept also where that takes a recomputed reader."""
    plain, full = problem.priced(level), problem.recomputing(level, every)
    for block, cost, load, before, after in zip(
        plain.cut.blocks, plain.costs, loads, plain.saved, full.saved, strict=True
    ):
        inner = cost.saved - cost.saved_outputs
        outputs = min(after, sum(map(nbytes_of, block.outputs)))
        yield dataclasses.replace(load, saved=load.saved + max(0, inner + outputs - before))
