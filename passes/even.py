"""The step of a schedule with perfectly even stages: a cheap estimate before any division.

Even stages are the best case of every named schedule: uneven ones can only take longer. The fullest
rank's extra seconds count too: those of whole blocks, or those of the recomputation that memory
forces even if blocks could be cut anywhere (`divide.relaxed`). A schedule whose even step is longer
than a known step need not be divided. Blocks are the coarsest, usually layers; parts of layers are
used only where layers are uneven, as in the stage pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from parcompiler.cost import collective
from parcompiler.passes.base import MARGIN
from parcompiler.passes.divide import DivisionTask
from parcompiler.passes.divide.pairs import slowest_pair
from parcompiler.passes.divide.relaxed import least_slowest_rank
from parcompiler.passes.divide.runs import slowest_run
from parcompiler.passes.estimate import least_update, orders_of
from parcompiler.passes.forced import division_task
from parcompiler.passes.loads import data
from parcompiler.passes.recompute import chosen
from parcompiler.passes.spread import vocabulary_cost
from parcompiler.plan import Plan
from parcompiler.priced import Priced
from parcompiler.problem import Problem
from parcompiler.schedules.planned import identity, outline, planned, trunk
from parcompiler.solver import ROUNDING
from parcompiler.timeline import Message, StageCost, VocabularyCost, step_time, timing

WAITING = ("1f1b", "gpipe", "interleaved")  # schedules whose ranks wait for gradients
MANY = 4  # micro-batches per rank from which on uneven stages hardly gain, see `is_shared`
UNEVEN = 0.99  # least step of uneven stages then, as a share of the even one (0.992 in 180 cases)
STEADY = 3  # micro-batches per rank, after which all ranks have begun and none has ended
FULL = 2  # micro-batches per rank with which every rank holds as much as with more
# micro-batches, beyond one per rank, that are enough under these schedules
SOON_FULL: dict[str | None, int] = {"1f1b": 0, "zb-h1": 0, "v-min": 0, "v-half": 1}
SMALL, PERIOD = 12, 12  # from SMALL ranks on, a step is linear in their number, in steps of PERIOD
# share by which a step extrapolated like this may be too long
UNSURE: dict[str | None, float] = {"v-half": 0.005, "v-min": 0.005}
UNSURE_PACE: dict[str | None, float] = {"interleaved": 0.01}  # of further micro-batches


class Packed(NamedTuple):
    """Even stages of a plan.

    `few` is the plan with few micro-batches, `priced` its blocks, `pace` the aggregate speed of the
    ranks in units of the fastest (the number of ranks, where all are alike). Seconds of a
    micro-batch on a rank: `even` if all ranks take equally long, `slowest` on the slowest if blocks
    could be cut anywhere and memory is limited (infinite where they do not fit), `whole` on the
    slowest, at least, if no block is cut.
    """

    few: Plan
    priced: Priced
    pace: float
    even: float
    slowest: float
    whole: float

    @property
    def is_coarse(self) -> bool:
        """Whether whole blocks are so uneven or large that the stage pass tries parts of them."""
        return self.slowest == math.inf or self.whole > (1 + MARGIN) * self.even

    def busy(self, problem: Problem, plan: Plan) -> float:
        """Seconds of the slowest rank's step if it were never idle."""
        spread = vocabulary_cost(problem, self.few)
        each = max(self.slowest, self.whole) + (spread.compute if spread else 0.0)
        return plan.microbatches * each + least_update(problem)


def packed_bound(problem: Problem, plan: Plan) -> float:
    """Lower bound of `even_step` without simulation, infinite where stages do not fit."""
    return min(_packed_bound(problem, plan, x) for x in _even_stages(problem, plan))


def even_step(problem: Problem, plan: Plan) -> float:
    """Seconds of a step with even stages under the plan's schedule, infinite where they do not fit.

    A lower bound from few micro-batches: each further one adds the slowest rank's time. Work on a
    vocabulary that all ranks share counts only as work of each rank, as it may run in idle time.
    Where whole layers are too uneven or do not fit, parts of layers count too. Cached.
    """
    key = _key("even", problem, plan)
    return problem.once(
        key, lambda: min(_simulated(problem, plan, x) for x in _even_stages(problem, plan))
    )


def is_shared(plan: Plan) -> bool:
    """Whether all ranks share a head, whose passes are part of the order, and there are so many
    micro-batches that uneven stages, which leave room for these passes, hardly gain."""
    shared = plan.vocabulary is not None and plan.vocabulary.spread and bool(plan.vocabulary.head)
    return shared and plan.microbatches >= MANY * plan.mesh.pipeline


def shared_step(problem: Problem, plan: Plan) -> float:
    """`even_step` with the passes of a shared head at their places in the order, which takes ten
    times as long to simulate. Cached."""
    if not is_shared(plan):
        return even_step(problem, plan)

    def find() -> float:
        least = math.inf
        known = ((_simulated(problem, plan, x), x) for x in _even_stages(problem, plan))
        for seconds, packed in sorted(known, key=itemgetter(0)):
            if seconds < least:
                least = min(least, max(seconds, _with_passes(problem, plan, packed)))
        return least

    return problem.once(_key("shared", problem, plan), find)


def is_forced(problem: Problem, plan: Plan) -> bool:
    """Whether even stages under the plan's schedule must recompute, or do not fit at all."""
    packed = _packed(problem, plan, problem.levels[0])
    return packed.slowest > (1 + ROUNDING) * packed.even


def roomy_bound(problem: Problem, plan: Plan) -> float:
    """Lower bound of `even_step` with unlimited memory, in seconds, without simulation.

    Each rank does its share of the work, and the last waits for the first micro-batch to arrive.
    Under a WAITING schedule the first also waits for its gradients to come back; an interleaved
    one waits for the way through a part of the stages only (Narayanan et al. 2021, arXiv
    2104.04473, section 2.2).
    """
    level = problem.levels[0]

    def find() -> float:
        priced = problem.recomputing(level, as_asked(problem, plan, level).recompute or ())
        pace = float(priced.pace or plan.mesh.pipeline)
        both = sum((*priced.forward, *priced.backward)) / pace
        spread = vocabulary_cost(problem, plan)
        shared = spread.compute if spread else 0.0  # it may be done while stages wait
        fill = _fill(plan, priced, pace)
        busy = plan.microbatches * both + max(fill, plan.microbatches * shared)
        return busy + least_update(problem)

    return problem.once(_key("roomy bound", problem, plan), find)


def _fill(plan: Plan, priced: Priced, pace: float) -> float:
    """Seconds that a rank waits at least, see `roomy_bound`; without messages."""
    way = sum((*priced.forward, *(priced.backward if plan.schedule in WAITING else ()))) / pace
    return (pace - 1) * way * plan.mesh.pipeline / len(outline(plan).placement)


def _with_few(plan: Plan, few: int) -> Plan:
    """The plan with `few` micro-batches, or fewer, and without the passes of a shared head, beside
    which stages hold more."""
    choice = plan.vocabulary and dataclasses.replace(plan.vocabulary, head=None)
    few = min(plan.microbatches, few)
    return dataclasses.replace(plan, microbatches=few, vocabulary=choice)


def _fullest(plan: Plan) -> Plan:
    """The plan with the fewest micro-batches with which its ranks hold as much as with all."""
    ranks, name = plan.mesh.pipeline, plan.schedule
    if name == "gpipe":
        return plan
    if name in SOON_FULL:
        return _with_few(plan, ranks + SOON_FULL[name])
    return _with_few(plan, FULL * ranks + plan.microbatches % ranks)


def _even_stages(problem: Problem, plan: Plan) -> Iterator[Packed]:
    """Even stages at ever finer granularities, as far as the stage pass would try them."""
    for level in problem.levels:
        packed = _packed(problem, plan, level)
        yield packed
        if not packed.is_coarse:
            return


def _key(name: str, problem: Problem, plan: Plan) -> tuple[object, ...]:
    """Cache key: the decisions that an even step depends on."""
    return name, *identity(plan), repr(problem.options.recompute), plan.recompute, plan.vocabulary


def _packed(problem: Problem, plan: Plan, level: int) -> Packed:
    """The even stages at a granularity. Cached."""

    def find() -> Packed:
        ranks = plan.mesh.pipeline
        few = _with_few(plan, STEADY * ranks + plan.microbatches % ranks)
        trial = as_asked(problem, _fullest(plan), level)
        priced = problem.recomputing(level, trial.recompute or ())
        task = division_task(problem, trial, level)
        slowest, pace = least_slowest_rank(task), float(task.pace(range(task.ranks)))
        even = sum((*priced.forward, *priced.backward)) / pace
        seconds = [load.seconds for load in task.loads]
        whole = _longest(seconds, task.ranks) if task.is_uniform else 0.0
        if task.is_linked and task.each <= 2 and len(seconds) >= task.stages:
            key = "slowest whole", task.placement, *((x.seconds, x.by_rank) for x in task.loads)
            whole = max(whole, problem.once(key, lambda: _slowest_whole(task, whole)))
        return Packed(few, priced, pace, even, slowest, whole)

    return problem.once((*_key("packed", problem, plan), level), find)


def _packed_bound(problem: Problem, plan: Plan, packed: Packed) -> float:
    """Lower bound of `_simulated` without simulation."""
    if packed.slowest == math.inf:
        return math.inf
    step = plan.microbatches * packed.even + _fill(plan, packed.priced, packed.pace)
    return _with_extra(problem, plan, packed, step)


def _simulated(problem: Problem, plan: Plan, packed: Packed) -> float:
    """Seconds of the even step at a granularity, infinite where stages do not fit."""
    few, priced, pace, even, slowest, _ = packed
    if slowest == math.inf:
        return math.inf
    sums = tuple(map(sum, (priced.forward, priced.backward, priced.weight, priced.hidden)))
    key = "even stages", identity(few), sums, pace  # vocabulary methods with one order share it
    step = problem.once(key, lambda: _step(problem, few, priced, pace))
    step += (plan.microbatches - few.microbatches) * even
    return _with_extra(problem, plan, packed, step)


def _with_extra(problem: Problem, plan: Plan, packed: Packed, step: float) -> float:
    """Seconds of a `step` of even stages with the fullest rank's extra seconds and its update.

    Schedules that are not WAITING may use idle time for what the fullest rank has beyond an even
    share because no block is cut.
    """
    _, _, _, even, slowest, whole = packed
    more = (max(slowest, whole) if plan.schedule in WAITING else slowest) - even
    step += (plan.microbatches - 1) * max(0.0, more) + least_update(problem)
    return max(packed.busy(problem, plan), step)


def _with_passes(problem: Problem, plan: Plan, packed: Packed) -> float:
    """Seconds of the even step at a granularity with the passes of a shared head, infinite where
    stages do not fit."""
    spread = vocabulary_cost(problem, plan)
    if packed.slowest == math.inf or spread is None:
        return packed.slowest
    few = dataclasses.replace(plan, microbatches=packed.few.microbatches)
    # Uneven stages of these schedules gain where they wait for the passes (1.5 % in 1,600 cases).
    more = 0 if plan.schedule in UNSURE else plan.microbatches // plan.mesh.pipeline - STEADY
    busy = (plan.microbatches - few.microbatches) * (packed.even + spread.compute)
    sums = tuple(map(sum, (packed.priced.forward, packed.priced.backward)))
    key = "even with passes", identity(few), more, sums, packed.pace, spread
    inputs = packed.priced, packed.pace, spread, more
    step = problem.once(key, lambda: _step(problem, few, *inputs)) + (0.0 if more else busy)
    return UNEVEN * (step + least_update(problem))


def _slowest_whole(task: DivisionTask, known: float) -> float:
    """Lower bound on the slowest rank's seconds where stages are runs of whole blocks, one or two
    on each rank; of no use below the lower bound `known`."""
    if task.each == 1:
        return slowest_run(task) * task.unit
    units = math.ceil(known / task.unit) + len(task.loads)  # each is a rounded number of units
    return slowest_pair(task, max(units, task.even)) * task.unit


def _longest(seconds: Sequence[float], ranks: int) -> float:
    """Lower bound on the seconds of the slowest of equal ranks if no block is cut: of the longest
    `k * ranks + 1` blocks one rank has `k + 1`, at least as long as the `k + 1` shortest of them.

    >>> _longest([1.0] * 8 + [0.5], 4)
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


def _step(
    problem: Problem,
    plan: Plan,
    priced: Priced,
    pace: float,
    spread: VocabularyCost | None = None,
    more: int = 0,
) -> float:
    """Seconds of the step of even stages under the schedule, with the passes of a vocabulary on all
    ranks if `spread` is given; `pace` is the aggregate speed of the ranks in units of the fastest.

    For a fixed number of micro-batches per rank the step is linear in the number of ranks, from
    SMALL on and in steps of PERIOD; with the passes of a head it grows no slower. So that of a deep
    pipeline is extrapolated from two small ones. Of `more` further micro-batches per rank, each
    takes as long as in the smaller of them: ranks wait for the passes of a head as long in both.
    """
    ranks, m, unsure = plan.mesh.pipeline, plan.microbatches, UNSURE.get(plan.schedule, 0.0)
    placement = outline(plan).placement
    stages = len(placement)
    parts = pace * stages / ranks
    cost = StageCost(
        forward=sum(priced.forward) / parts,
        backward=sum(priced.backward) / parts,
        weight=sum(priced.weight) / parts,
        hidden=sum(priced.hidden) / parts,
        resident=0,
        saved=0,
    )
    messages = list(_messages(problem, plan))

    def on(fewer: int, microbatches: int) -> float:
        mesh = dataclasses.replace(plan.mesh, pipeline=fewer)
        smaller = dataclasses.replace(plan, mesh=mesh, microbatches=microbatches)
        each = stages // ranks * fewer
        inputs = microbatches, [cost] * each, list(_messages(problem, smaller))
        if spread is None:
            return step_time(orders_of(smaller, trunk), *inputs)
        head = dataclasses.replace(spread, source=spread.source * each // stages)
        return step_time(orders_of(smaller, planned), *inputs, head)

    small = SMALL + ranks % PERIOD
    sent = {x.seconds for x in messages if placement[x.source] != placement[x.targets[0]]}
    if plan.orders is not None:
        step = timing(trunk(plan), [cost] * stages, messages).step_time
    elif small + PERIOD >= ranks or m < FULL * ranks or m * PERIOD % ranks or len(sent) > 1:
        step, small = on(ranks, m), min(small, ranks)
    else:
        least, further = (on(fewer, m * fewer // ranks) for fewer in (small, small + PERIOD))
        step = (least + (further - least) * (ranks - small) / PERIOD) * (1 - unsure)
    # While a micro-batch passes all other ranks, a rank is idle: on `ranks` of the fastest devices
    # for all stages but its own, on unequal ones at least for all blocks but its share of them.
    idle = step - m * sum((*priced.forward, *priced.backward)) / pace
    step -= idle * (ranks - pace) / max(1, ranks - 1)
    if more:
        begun, ended = (on(small, rounds * small) for rounds in (STEADY, STEADY + more))
        step += (ended - begun) / small * ranks * (1 - UNSURE_PACE.get(plan.schedule, 0.0))
    return step


def _messages(problem: Problem, plan: Plan) -> Iterator[Message]:
    """Messages of the smallest value between neighbouring blocks, from each stage to the next.

    Yields nothing where blocks form no chain: stages may be independent of each other then.
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
