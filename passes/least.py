"""Lower bounds on the step of every plan with even stages, for the options that are still open.

    vocabulary, sharding, schedule      `roomy_bound`: no simulation, memory for everything
    └── with memory                     `packed_bound`, then simulated: `even_step`, `shared_step`
        └── level of ZeRO               `roomy_bound`, with the exchange of data ranks
            └── with its memory         `packed_bound`, `even_step`, `shared_step`

A best-first search: the lowest bound is refined until it is that of a leaf, or high enough. The
passes use the cached results again. Like the passes, the bound assumes that even stages are the
best under every named schedule.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from parcompiler.errors import InputError, PlanError
from parcompiler.passes.base import MARGIN
from parcompiler.passes.even import (
    even_step,
    is_forced,
    is_shared,
    packed_bound,
    roomy_bound,
    shared_step,
)
from parcompiler.passes.schedule import CANDIDATES, candidates_for, with_more_stages
from parcompiler.passes.shard import ShardPass
from parcompiler.passes.shard.local import local
from parcompiler.passes.vocabulary import choices_for
from parcompiler.passes.zero import least_exchange
from parcompiler.plan import Plan, VocabularyChoice
from parcompiler.problem import LEVELS, Problem
from parcompiler.solver import ROUNDING

Finer = Callable[[], "Iterator[Bound]"]
Bound = tuple[float, Finer | None]  # seconds, and a function that refines it (None: a leaf)


def is_known(problem: Problem) -> bool:
    """Whether even stages are the best under all schedules in question, so that the bound holds."""
    return problem.options.schedule in ("auto", *CANDIDATES)


class LeastStep:
    """Lower bound on the step of every plan that completes `start`, refined on request."""

    def __init__(self, problem: Problem, start: Plan) -> None:
        self._number = itertools.count()  # breaks ties: the first of equal bounds
        self._open: list[tuple[float, int, Finer | None]] | None = None
        self._all = partial(_schedules, problem, start)

    def seconds(self, enough: float = math.inf) -> float:
        """The shortest step of even stages, or the first lower bound of it that reaches `enough`.

        Infinite where blocks fit on no ranks even if they could be cut anywhere; 0 where an option
        is wrong: the passes will say so.
        """
        try:
            if self._open is None:
                self._open = []
                self._add(0.0, self._all())
                if not self._open:
                    self._add(0.0, [(0.0, None)])
            while self._open:
                seconds, _, finer = self._open[0]
                sure = (1 - ROUNDING) * seconds
                if finer is None or sure >= enough:
                    return sure
                heapq.heappop(self._open)
                self._add(seconds, finer())
        except (PlanError, InputError):
            self._open = [(0.0, 0, None)]
            return 0.0
        return math.inf

    def _add(self, least: float, bounds: Iterable[Bound]) -> None:
        """Push the refined bounds of a case whose bound was `least`."""
        assert self._open is not None
        for seconds, finer in bounds:
            heapq.heappush(self._open, (max(least, seconds), next(self._number), finer))


def least_step(problem: Problem, start: Plan, enough: float = math.inf) -> float:
    """`LeastStep.seconds`, asked once."""
    return LeastStep(problem, start).seconds(enough)


def _schedules(problem: Problem, start: Plan) -> Iterator[Bound]:
    """A bound for each vocabulary method and schedule, or for those that are decided."""
    if start.schedule is not None:
        yield _roomy(problem, start), partial(_with_memory, problem, start, is_plain=False)
        return
    asked = problem.options.schedule
    for choice in _methods(problem):
        begun = dataclasses.replace(start, vocabulary=choice, zero=None)
        plan = dataclasses.replace(_sharded(problem, begun), zero=start.zero)
        rank_problem = local(problem, plan)
        for candidate in candidates_for(rank_problem, plan):
            if asked in ("auto", candidate.schedule):
                seconds = roomy_bound(rank_problem, candidate)
                if _is_selective_open(problem, candidate) and _is_short(problem, candidate):
                    others = (_roomy(problem, other) for other in _selective(problem, candidate))
                    seconds = min(seconds, *others)
                yield seconds, partial(_with_memory, problem, candidate)


def _methods(problem: Problem) -> list[VocabularyChoice | None]:
    """The vocabulary methods to bound. "vocab-1" computes as much as "vocab-2" and waits once more:
    of 1,200 bounds none was lower by more than 0.4 %."""
    if problem.mesh.pipeline == 1:
        return [None]
    choices = choices_for(problem)
    if any(choice.method == "vocab-2" for choice in choices):
        choices = [choice for choice in choices if choice.method != "vocab-1"]
    return [*choices]


def _sharded(problem: Problem, plan: Plan) -> Plan:
    return ShardPass().run(local(problem, plan), plan)


def _is_selective_open(problem: Problem, plan: Plan) -> bool:
    """Whether cheap operators may be recomputed and are not yet."""
    return problem.options.recompute == "auto" and not plan.selective


def _may_offload(problem: Problem, plan: Plan) -> bool:
    """Whether blocks that run again may be offloaded instead."""
    return problem.options.recompute == "auto" and problem.may_offload and not plan.offload


def _is_forced(problem: Problem, plan: Plan) -> bool:
    return is_forced(local(problem, plan), plan)


def _selective(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plan with cheap operators recomputed, also with more stages on a rank."""
    again = _sharded(problem, dataclasses.replace(plan, selective=True, sharding=None))
    yield again
    yield from with_more_stages(local(problem, again), again)


def _is_short(problem: Problem, plan: Plan) -> bool:
    """Whether memory decides the sharding of a plan."""
    return ShardPass().is_short(local(problem, dataclasses.replace(plan, sharding=None)))


def _with_memory(problem: Problem, plan: Plan, *, is_plain: bool = True) -> Iterator[Bound]:
    """Bounds with limited memory, at the highest level of ZeRO where that is open. Where memory
    forces a plain plan to recompute blocks, or another sharding, also of plans that recompute cheap
    operators instead, which does not pay otherwise; where these recompute blocks as well, also of
    plans that offload them."""
    is_plain = is_plain and _is_selective_open(problem, plan)
    others: Iterable[Plan] = ()
    if is_plain and (_is_short(problem, plan) or _is_forced(problem, plan)):
        is_plain, others = False, _selective(problem, plan)
    elif plan.selective and _may_offload(problem, plan) and _is_forced(problem, plan):
        others = [dataclasses.replace(plan, offload=True)]
    for other in others:
        yield _roomy(problem, other), partial(_with_memory, problem, other)
    steps = packed_bound, even_step, *((shared_step,) if is_shared(plan) else ())
    yield from _stepping(problem, plan, is_plain, steps)


def _stepping(
    problem: Problem,
    plan: Plan,
    is_plain: bool,
    steps: Sequence[Callable[[Problem, Plan], float]],
) -> Iterator[Bound]:
    """Bounds by one of these functions after the other: each is sharper, and takes longer."""
    step, *sharper = steps
    seconds = step(local(problem, plan), plan)
    if seconds < math.inf and sharper:
        yield seconds, partial(_stepping, problem, plan, is_plain, sharper)
        return
    if _is_open(problem, plan):
        if seconds < math.inf:
            yield seconds, partial(_levels, problem, plan, is_plain)
        return
    if seconds < math.inf:
        yield seconds + least_exchange(local(problem, plan), plan), None
    roomy = _roomy(problem, plan)
    if plan.zero is not None and plan.sharding and seconds > (1 + MARGIN) * roomy:
        tailored = _sharded(problem, dataclasses.replace(plan, sharding=None))
        if tailored.sharding and tailored.sharding.templates != plan.sharding.templates:
            finer = partial(_with_memory, problem, tailored, is_plain=is_plain)
            yield max(roomy, _roomy(problem, tailored)), finer


def _is_open(problem: Problem, plan: Plan) -> bool:
    """Whether the level of ZeRO is to be weighed."""
    return plan.zero is None and problem.options.zero == "auto" and bool(problem.zero)


def _levels(problem: Problem, plan: Plan, is_plain: bool) -> Iterator[Bound]:
    """A bound for each level of ZeRO, with the sharding that was decided while the level was open.
    Where memory matters, one decided for the level may be better: `_stepping` tries it."""
    mesh = problem.mesh
    for level in LEVELS:
        whole = problem.at_zero(level)
        states = sum(map(whole.state_bytes, whole.graph.parameters))
        if states <= mesh.tensor * sum(whole.memories):
            trial = dataclasses.replace(plan, zero=level)
            finer = partial(_with_memory, problem, trial, is_plain=is_plain)
            yield _roomy(problem, trial), finer


def _roomy(problem: Problem, plan: Plan) -> float:
    """`roomy_bound`, plus the least exchange of data ranks."""
    rank_problem = local(problem, plan)
    again = problem.options.recompute not in ("auto", "none", "selective")
    return roomy_bound(rank_problem, plan) + least_exchange(rank_problem, plan, again=again)
