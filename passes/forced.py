"""The input of the stage solver: blocks with their costs, kept and recomputed.

A recomputed block keeps its inputs. An input that no other block keeps must be kept as an output of
the block that makes it; that is always counted, so that memory is never understated.
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
from parcompiler.schedules.planned import held, identity, left, outline


def division_task(
    problem: Problem,
    plan: Plan,
    level: int,
    limits: Sequence[int] | None = None,
    *,
    is_free: bool | None = None,
) -> DivisionTask:
    """The division problem at a granularity under the plan's schedule, with `limits` bytes on each
    rank (None: all but what is reserved).

    With `is_free` (None: as in the options) the solver chooses which blocks are recomputed; else
    those of the plan are. Cached: the bound and the division of a schedule share it.
    """
    if limits is None:
        limits = [memory - reserved(problem, plan) for memory in problem.memories]
    if is_free is None:
        is_free = problem.options.recompute == "auto"
    rooms = tuple(float(max(1, limit)) for limit in limits)
    inputs = outline(plan).placement, plan.microbatches, held(plan), rooms
    if not is_free:
        loads, flows = data_under(problem, plan, level)
        return DivisionTask(loads, flows, *inputs)
    key = "division task", level, rooms, identity(plan)
    blocks = "free blocks", level, outline(plan).asynchronous, left(plan)  # many schedules share it

    def find() -> DivisionTask:
        loads, again, flows = problem.once(blocks, lambda: _free(problem, plan, level))
        return DivisionTask(loads, flows, *inputs, again)

    return problem.once(key, find)


def names_of(problem: Problem, level: int, blocks: Collection[int]) -> tuple[str, ...]:
    """The names of the blocks with these numbers, in the model's order."""
    names = [block.name for block in problem.priced(level).cut.blocks]
    return tuple(names[b] for b in sorted(blocks))


def _free(
    problem: Problem, plan: Plan, level: int
) -> tuple[tuple[Load, ...], tuple[Load | None, ...], tuple[Flow, ...]]:
    """Loads of the blocks, loads when recomputed or offloaded (None where that saves nothing), and
    the values between blocks."""
    every = chosen(problem, level, "offload" if problem.offload else "full")
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
    """Loads of the blocks, including outputs that only a recomputed reader would keep."""
    plain, full = problem.priced(level), problem.recomputing(level, every)
    for block, cost, load, before, after in zip(
        plain.cut.blocks, plain.costs, loads, plain.saved, full.saved, strict=True
    ):
        inner = cost.saved - cost.saved_outputs
        outputs = min(after, sum(map(nbytes_of, block.outputs)))
        yield dataclasses.replace(load, saved=load.saved + max(0, inner + outputs - before))
