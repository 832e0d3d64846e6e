"""The step of a schedule with perfectly even stages: a cheap estimate before any division.

Even stages are the best case of every named schedule: stages of whole blocks can only take longer.
Recomputation that memory forces is added as if blocks could be cut anywhere (`divide.relaxed`). A
schedule whose even step is longer than a step already found need not be divided. All this is for
the coarsest blocks, usually layers, as the stage pass uses parts of layers only where layers are
uneven.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from parcompiler.cost import collective
from parcompiler.passes.divide.relaxed import least_slowest_rank
from parcompiler.passes.estimate import least_update, orders_of
from parcompiler.passes.forced import division_task
from parcompiler.passes.loads import data
from parcompiler.passes.recompute import chosen
from parcompiler.passes.spread import vocabulary_cost
from parcompiler.plan import Plan
from parcompiler.priced import Priced
from parcompiler.problem import Problem
from parcompiler.schedules.planned import identity, outline, trunk
from parcompiler.timeline import Message, StageCost, step_time, timing

TINY = 1e-9  # sums of the same numbers in another order
STEADY = 3  # micro-batches for each rank, after which all ranks have begun and none has ended


class Even(NamedTuple):
    """Seconds of a step with even stages, infinite where they do not fit, and whether memory forces
    recomputation."""

    seconds: float
    is_forced: bool


def even_step(problem: Problem, plan: Plan) -> float:
    """Seconds of a step with even stages under the plan's schedule, infinite where they do not fit.

    Cached. Work on a vocabulary that all ranks share is added to each rank's; it may run in what
    would be idle time.
    """
    return _even_at_first(problem, plan).seconds


def is_forced(problem: Problem, plan: Plan) -> bool:
    """Whether even stages under the plan's schedule must recompute, or do not fit at all."""
    return _even_at_first(problem, plan).is_forced


def _even_at_first(problem: Problem, plan: Plan) -> Even:
    """The even step of the coarsest blocks."""
    level = problem.levels[0]
    return problem.once(_key("even", problem, plan), lambda: _even(problem, plan, plan, level))


def even_bound(problem: Problem, plan: Plan) -> float:
    """Lower bound of `even_step`, in seconds, from few micro-batches: each further one adds at
    least the slowest rank's time. Where memory forces layers to be recomputed, it may be the bound
    of parts of layers."""
    key = _key("even bound", problem, plan)
    return problem.once(key, lambda: min(_bounds(problem, plan)))


def roomy_bound(problem: Problem, plan: Plan) -> float:
    """Lower bound of `even_step` with unlimited memory, in seconds, without simulation.

    Each rank does its share of the work, and the last waits for the first micro-batch to arrive.
    Under 1F1B and GPipe the first also waits for its gradients to come back, interleaved schedules
    for the way through a part of the stages (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
    """
    level = problem.levels[0]

    def find() -> float:
        priced = problem.recomputing(level, as_asked(problem, plan, level).recompute or ())
        ranks, pace = plan.mesh.pipeline, float(priced.pace or plan.mesh.pipeline)
        forward, both = sum(priced.forward) / pace, sum((*priced.forward, *priced.backward)) / pace
        spread = vocabulary_cost(problem, plan)
        there = both if plan.schedule in ("1f1b", "gpipe", "interleaved") else forward
        fill = (ranks - 1) * there * ranks / len(outline(plan).placement)
        shared = spread.compute if spread else 0.0  # it may be done while stages wait
        busy = plan.microbatches * both + max(fill, plan.microbatches * shared)
        return busy + least_update(problem)

    return problem.once(_key("roomy bound", problem, plan), find)


def _few(plan: Plan) -> Plan:
    """The plan with so many micro-batches that a steady state is reached, in the order that its
    stages have by themselves: beside the passes of a head on all ranks they hold more."""
    ranks, m, choice = plan.mesh.pipeline, plan.microbatches, plan.vocabulary
    choice = choice and dataclasses.replace(choice, head=None)
    few = min(m, STEADY * ranks + m % ranks)
    return dataclasses.replace(plan, microbatches=few, vocabulary=choice)


def _bounds(problem: Problem, plan: Plan) -> Iterator[float]:
    """The bounds of ever finer granularities, while these may be smaller."""
    few = _few(plan)
    for level in problem.levels:
        found = _even(problem, plan, few, level)
        yield found.seconds
        if not found.is_forced:
            return


def _key(what: str, problem: Problem, plan: Plan) -> tuple[object, ...]:
    """Cache key: the decisions that an even step depends on."""
    return what, *identity(plan), repr(problem.options.recompute), plan.recompute, plan.vocabulary


def _even(problem: Problem, plan: Plan, few: Plan, level: int) -> Even:
    """The even step at a granularity, simulated with the micro-batches of `few`; each further one
    adds the slowest rank's time."""
    trial = as_asked(problem, few, level)
    priced = problem.recomputing(level, trial.recompute or ())
    task = division_task(problem, trial, level)
    slowest = least_slowest_rank(task)
    if slowest == math.inf:
        return Even(math.inf, is_forced=True)
    pace = float(task.pace(range(task.ranks)))  # the ranks, where all are alike
    even = sum((*priced.forward, *priced.backward)) / pace
    is_forced = slowest - even > even * TINY
    return Even(_seconds(problem, plan, few, priced, pace, slowest), is_forced)


def _seconds(
    problem: Problem, plan: Plan, few: Plan, priced: Priced, pace: float, slowest: float
) -> float:
    """Seconds of a step whose slowest rank takes at least `slowest` for a micro-batch."""
    even = sum((*priced.forward, *priced.backward)) / pace
    spread = vocabulary_cost(problem, few)
    busy = plan.microbatches * (slowest + (spread.compute if spread else 0.0))
    sums = tuple(map(sum, (priced.forward, priced.backward, priced.weight, priced.hidden)))
    key = "even stages", identity(few), sums, pace  # methods with one order share it
    step = problem.once(key, lambda: _step(problem, few, priced, pace))
    waits = step + (plan.microbatches - few.microbatches) * even
    least = max(busy, waits + (plan.microbatches - 1) * max(0.0, slowest - even))
    return least + least_update(problem)


def as_asked(problem: Problem, plan: Plan, level: int) -> Plan:
    """The plan with the blocks that the user asked to recompute."""
    wanted = problem.options.recompute
    names = () if wanted == "auto" else chosen(problem, level, wanted)
    return dataclasses.replace(plan, recompute=names)


def _step(problem: Problem, plan: Plan, priced: Priced, pace: float) -> float:
    """The step of even stages under the schedule, without a vocabulary on all ranks; `pace` is the
    aggregate speed of the ranks in units of the fastest."""
    stages = len(outline(plan).placement)
    parts = pace * stages / plan.mesh.pipeline
    cost = StageCost(
        forward=sum(priced.forward) / parts,
        backward=sum(priced.backward) / parts,
        weight=sum(priced.weight) / parts,
        hidden=sum(priced.hidden) / parts,
        resident=0,
        saved=0,
    )
    what = [cost] * stages, list(_messages(problem, plan))
    if plan.orders is not None:
        return timing(trunk(plan), *what).step_time
    return step_time(orders_of(plan, trunk), plan.microbatches, *what)


def _messages(problem: Problem, plan: Plan) -> Iterator[Message]:
    """Messages of the smallest value between neighbouring blocks, from each stage to the next.

    None where blocks form no chain: stages may not depend on each other then.
    """
    loads, flows = data(problem, problem.levels[0])
    largest = dict.fromkeys(range(len(loads) - 1), 0)
    for flow in flows:
        if flow.producer + 1 in flow.consumers:
            largest[flow.producer] = max(largest[flow.producer], flow.saved)
    least, placement = min(largest.values(), default=0), outline(plan).placement
    for j, k in pairwise(range(len(placement) if least else 0)):
        seconds = collective.message(problem.mesh, [(placement[j], placement[k])], least)
        yield Message(j, (k,), seconds, gradient=0.0, nbytes=least)
