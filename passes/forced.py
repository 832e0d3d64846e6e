"""What memory forces to be recomputed: chosen together with the stages, or for stages as they are.

The programme is in `divide/joint`. A block that is recomputed keeps what it reads. Where it is the
only one to keep that, the block that made it keeps its output: the programme counts that in any
case, and so never too little.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from parcompiler.graph import nbytes_of
from parcompiler.passes.divide import Load, StageDivision
from parcompiler.passes.divide.again import Repeatable
from parcompiler.passes.divide.joint import divide_twice
from parcompiler.passes.divide.task import DivisionTask
from parcompiler.passes.loads import data_under
from parcompiler.passes.recompute import chosen
from parcompiler.plan import Plan
from parcompiler.problem import Problem
from parcompiler.schedules.planned import held, identity, outline


def jointly(
    problem: Problem, plan: Plan, level: int, limits: Sequence[float]
) -> tuple[StageDivision, tuple[str, ...]]:
    """The best division at a granularity where ranks have so many bytes for their blocks, and the
    blocks that it recomputes. Raises as `divide_twice`."""
    task, again = joint_task(problem, plan, level, limits)
    found = divide_twice(
        task.loads, again, task.flows, task.placement, task.microbatches, task.held, task.limits
    )
    return found.division, names_of(problem, level, found.twice)


def spared(
    problem: Problem, plan: Plan, level: int, stage_of: Sequence[int], limits: Sequence[float]
) -> tuple[str, ...] | None:
    """The blocks to recompute with these stages, at the least time; None when nothing fits."""
    task, again = joint_task(problem, plan, level, limits)
    found = Repeatable(task, tuple(again)).spared(stage_of)
    return None if found is None else names_of(problem, level, found)


def names_of(problem: Problem, level: int, blocks: frozenset[int]) -> tuple[str, ...]:
    """The names of blocks, in their order."""
    names = [block.name for block in problem.priced(level).cut.blocks]
    return tuple(names[b] for b in sorted(blocks))


def joint_task(
    problem: Problem, plan: Plan, level: int, limits: Sequence[float]
) -> tuple[DivisionTask, list[Load | None]]:
    """The blocks as they are, and as they are when recomputed; None where that does not help.

    Found once for a schedule: who bounds it, divides it quickly and divides it well asks for it.
    """
    key = "joint task", level, tuple(limits), identity(plan)
    return problem.once(key, lambda: _joint_task(problem, plan, level, limits))


def _joint_task(
    problem: Problem, plan: Plan, level: int, limits: Sequence[float]
) -> tuple[DivisionTask, list[Load | None]]:
    """The same, for the first time."""
    schedule = outline(plan)
    every = chosen(problem, level, "full")
    loads, flows = data_under(problem, dataclasses.replace(plan, recompute=()), level)
    full, _ = data_under(problem, dataclasses.replace(plan, recompute=every), level)
    kept = list(_keeping(problem, level, every, loads))
    names = [block.name for block in problem.priced(level).cut.blocks]
    again = [
        other
        if name in every and (other.saved < load.saved or other.moment < load.moment)
        else None
        for name, load, other in zip(names, kept, full, strict=True)
    ]
    rooms = [float(max(1, limit)) for limit in limits]
    given = kept, flows, schedule.placement, plan.microbatches, held(plan), rooms
    return DivisionTask(*given), again


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
