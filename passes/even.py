"""The step of a schedule with perfectly even stages: a cheap estimate before any division.

Even stages are the best case of every named schedule: uneven ones can only take longer, as that of
the fullest rank does, if no block is cut. Recomputation that memory forces is added as if blocks
could be cut anywhere (`divide.relaxed`). A schedule whose even step is longer than a step already
found need not be divided. All this is for the coarsest blocks, usually layers, as the stage pass
uses parts of layers only where layers are uneven.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
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
WAITING = ("1f1b", "gpipe", "interleaved")  # schedules whose ranks wait for gradients
SLACK = 0.1  # share by which whole blocks may be uneven before the stage pass tries parts of them
STEADY = 2  # micro-batches for each rank, after which all ranks have begun and none has ended


class Even(NamedTuple):
    """Seconds of a step with even stages, infinite where they do not fit; whether memory forces
    recomputation; and whether whole blocks are too uneven, or too large: parts are tried then."""

    seconds: float
    is_forced: bool
    is_coarse: bool


def even_step(problem: Problem, plan: Plan) -> float:
    """Seconds of a step with even stages under the plan's schedule, infinite where they do not fit.

    A lower bound from few micro-batches: each further one adds the slowest rank's time. Cached.
    Work on a vocabulary that all ranks share is added to each rank's; it may run in what would be
    idle time. It may be the step of parts of layers where whole layers are too uneven, or fit on no
    ranks.
    """
    key = _key("even", problem, plan)
    return problem.once(key, lambda: min(_steps(problem, plan)))


def is_forced(problem: Problem, plan: Plan) -> bool:
    """Whether even stages under the plan's schedule must recompute, or do not fit at all."""
    key, level = _key("forced", problem, plan), problem.levels[0]
    return problem.once(key, lambda: _even(problem, plan, level).is_forced)


def roomy_bound(problem: Problem, plan: Plan) -> float:
    """Lower bound of `even_step` with unlimited memory, in seconds, without simulation.

    Each rank does its share of the work, and the last waits for the first micro-batch to arrive.
    Where it is WAITING, the first also waits for its gradients to come back, under interleaved
    schedules on the way through a part of the stages (Narayanan et al. 2021, arXiv 2104.04473,
    section 2.2).
    """
    level = problem.levels[0]

    def find() -> float:
        priced = problem.recomputing(level, as_asked(problem, plan, level).recompute or ())
        ranks, pace = plan.mesh.pipeline, float(priced.pace or plan.mesh.pipeline)
        forward, both = sum(priced.forward) / pace, sum((*priced.forward, *priced.backward)) / pace
        spread = vocabulary_cost(problem, plan)
        there = both if plan.schedule in WAITING else forward
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


def _steps(problem: Problem, plan: Plan) -> Iterator[float]:
    """The even steps of ever finer granularities, while the stage pass would try these."""
    for level in problem.levels:
        found = _even(problem, plan, level)
        yield found.seconds
        if not found.is_coarse:
            return


def _key(what: str, problem: Problem, plan: Plan) -> tuple[object, ...]:
    """Cache key: the decisions that an even step depends on."""
    return what, *identity(plan), repr(problem.options.recompute), plan.recompute, plan.vocabulary


def _even(problem: Problem, plan: Plan, level: int) -> Even:
    """The even step at a granularity. Zero-bubble schedules may do what the fullest rank has more
    of, where no block is cut, in idle time."""
    few = _few(plan)
    trial = as_asked(problem, few, level)
    priced = problem.recomputing(level, trial.recompute or ())
    task = division_task(problem, trial, level)
    slowest = least_slowest_rank(task)
    if slowest == math.inf:
        return Even(math.inf, is_forced=True, is_coarse=True)
    pace = float(task.pace(range(task.ranks)))  # the ranks, where all are alike
    even = sum((*priced.forward, *priced.backward)) / pace
    whole = _fullest([load.seconds for load in task.loads], task.ranks) if task.is_uniform else 0.0
    spread = vocabulary_cost(problem, few)
    busy = plan.microbatches * (max(slowest, whole) + (spread.compute if spread else 0.0))
    sums = tuple(map(sum, (priced.forward, priced.backward, priced.weight, priced.hidden)))
    key = "even stages", identity(few), sums, pace  # methods with one order share it
    step = problem.once(key, lambda: _step(problem, few, priced, pace))
    waits = step + (plan.microbatches - few.microbatches) * even
    more = (max(slowest, whole) if plan.schedule in WAITING else slowest) - even
    least = max(busy, waits + (plan.microbatches - 1) * max(0.0, more)) + least_update(problem)
    return Even(least, slowest - even > even * TINY, whole > (1 + SLACK) * even)


def _fullest(seconds: Sequence[float], ranks: int) -> float:
    """Seconds of the slowest of equal ranks at least, if no block is cut: of the longest
    `k * ranks + 1` blocks one rank has `k + 1`, and these take as long as the shortest of them.

    >>> _fullest([1.0] * 8 + [0.5], 4)
    2.5
    """
    longest = sorted(seconds, reverse=True)
    return max(
        math.fsum(longest[k * (ranks - 1) : k * ranks + 1])
        for k in range((len(longest) - 1) // ranks + 1)
    )


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
