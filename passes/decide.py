"""Make a plan of a problem: each pass decides its part; of nearly equal plans, take the plainest.

    start     the plan before any decision
    fastest   all passes, over the levels of ZeRO, vocabulary methods and schedules in question
    plainest  of all plans at most MARGIN slower: predictions are no more accurate than that

Plainer is, in this order: fewer pipeline ranks, the schedule that stands first in CANDIDATES, fewer
stages on a rank, nothing recomputed, a whole vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from parcompiler.data_updates import ALL_REDUCE
from parcompiler.errors import InfeasibleError, InputError, PlanError
from parcompiler.passes import DEFAULT, exchange, zero
from parcompiler.passes.base import GAIN, MARGIN, Bounding, Pass
from parcompiler.passes.estimate import estimate, host_bytes
from parcompiler.passes.even import is_forced, roomy_bound
from parcompiler.passes.least import is_known, least_step
from parcompiler.passes.schedule import CANDIDATES, SchedulePass, candidates_for
from parcompiler.passes.shard.local import local
from parcompiler.passes.stage import StagePass
from parcompiler.passes.user_passes import check_finished, checked
from parcompiler.passes.vocabulary import VocabularyPass, choices_for
from parcompiler.plan import MeshChoice, Method, Plan, Shape
from parcompiler.problem import Problem

BUILT_IN = frozenset(map(type, DEFAULT))  # these read the option `recompute`
Observer = Callable[[str], AbstractContextManager[None]]


def start(problem: Problem) -> Plan:
    """The plan before any decision."""
    mesh, options = problem.mesh, problem.options
    return Plan(
        model=problem.graph.name,
        fingerprint=(problem.graph.undivided or problem.graph).fingerprint,
        mesh=Shape(mesh.pipeline, mesh.tensor, mesh.data, mesh.name, mesh.context, mesh.expert),
        microbatches=options.microbatches,
        context=problem.context,
        precision=options.precision,
        optimizer=options.optimizer,
        zero=options.zero if mesh.replicas > 1 and isinstance(options.zero, int) else None,
        updates=None if options.data_updates == ALL_REDUCE else options.data_updates,
        selective=options.recompute in ("selective", "offload"),
        offload=options.recompute == "offload",
    )


def decide(
    problem: Problem, passes: Sequence[Pass], observer: Observer = lambda name: nullcontext()
) -> Plan:
    """Run the passes one after the other; nothing is lowered or verified.

    Raises InfeasibleError when nothing fits, InputError for options that the model cannot have.
    """
    plan = fastest(problem, passes, observer)
    with suppress(PlanError):  # an order that never ends: the verifier says why
        return plainest(problem, passes, plan, observer=observer)
    return plan


def fastest(
    problem: Problem,
    passes: Sequence[Pass],
    observer: Observer = lambda name: nullcontext(),
    below: float = math.inf,
) -> Plan:
    """The plan with about the shortest step; levels of ZeRO are compared by running all passes.

    Only steps below `below` seconds are wanted. Raises InfeasibleError when nothing fits or is
    shorter.
    """
    bound = _bounding(problem, passes)
    complete = _completing(problem, passes, bound, observer)
    return zero.weighed(problem, start(problem), complete, bound, below)


def plainest(
    problem: Problem,
    passes: Sequence[Pass],
    plan: Plan,
    enough: float | None = None,
    observer: Observer = lambda name: nullcontext(),
) -> Plan:
    """The plainest plan on the same mesh and level of ZeRO with a step of at most `enough` seconds
    (None: MARGIN more than the plan's), and a lowered step of at most MARGIN more than the plan's.
    Raises PlanError where the plan's order deadlocks."""
    if tuple(passes) != DEFAULT or plan.mesh.pipeline == 1 or plan.orders is not None:
        return plan
    seconds, judged = step_of(problem, plan), _judged_step(problem, plan)
    enough = (1 + MARGIN) * seconds if enough is None else enough
    best = plan
    for trial in _plainer(problem, plan):
        if trial.key >= plainness(best):
            continue
        named = dataclasses.replace(problem, options=trial.options(problem))
        bound, begun = _bounding(named, passes), dataclasses.replace(start(named), zero=plan.zero)
        if bound(begun, enough) >= enough:
            continue
        complete = _completing(named, passes, bound, observer)
        with suppress(InfeasibleError, InputError):
            plainer_plan = complete(begun, enough)
            if (
                plainness(plainer_plan) < plainness(best)
                and step_of(named, plainer_plan) <= enough
                and _judged_step(named, plainer_plan) <= (1 + MARGIN) * judged
            ):
                best = plainer_plan
    if best is plan:
        return plan
    step = step_of(problem, best)
    weighed = tuple(
        dataclasses.replace(item, seconds=step, reason=None)
        if (item.schedule, item.virtual_stages) == (best.schedule, best.virtual_stages)
        else item
        for item in plan.weighed or ()
    )
    vocabulary = best.vocabulary
    if vocabulary is not None and plan.vocabulary is not None:
        rank_problem = local(problem, best)
        peak = max(estimate(rank_problem, best).peak_memory)
        methods = tuple(
            Method(item.method, best.schedule, step, peak)
            if item.method == vocabulary.method
            else item
            for item in plan.vocabulary.weighed or ()
        )
        vocabulary = dataclasses.replace(vocabulary, weighed=methods or None)
    return dataclasses.replace(
        best, weighed=weighed or None, vocabulary=vocabulary, runner_up=choice_of(plan, seconds)
    )


def step_of(problem: Problem, plan: Plan) -> float:
    """Seconds of a plan's step, with the data ranks' exchange that no compute hides."""
    return exchange.step_of(local(problem, plan), plan)


def _judged_step(problem: Problem, plan: Plan) -> float:
    """Seconds of a plan's lowered step where data ranks exchange."""
    return exchange.judged_step(local(problem, plan), plan)


def check_host(problem: Problem, plan: Plan) -> None:
    """Raise InfeasibleError where a rank would keep more in its node's memory than its share."""
    if not plan.offload or plan.stages is None:
        return
    ranks, kept = problem.mesh.size, host_bytes(local(problem, plan), plan)
    for rank, (device, size) in enumerate(zip(problem.devices, kept, strict=True)):
        beside = min(device.devices_per_node, ranks)
        if device.host_memory is not None and size * beside > device.host_memory:
            message = (
                f"rank {rank} would keep {size:,} bytes of offloaded activations in its node, and "
                f"so {beside} ranks {size * beside:,}; a node of {device.name} has "
                f"{device.host_memory:,} (host_memory): recompute layers, or take more ranks"
            )
            raise InfeasibleError(message)


def plainness(plan: Plan) -> tuple[int, ...]:
    """Sort key: plainer plans first."""
    name = plan.schedule or ""
    place = CANDIDATES.index(name) if name in CANDIDATES else len(CANDIDATES)
    spread = plan.vocabulary is not None and plan.vocabulary.spread
    again = plan.selective or bool(plan.recompute)
    return plan.mesh.pipeline, place, plan.virtual_stages, again, spread


def choice_of(plan: Plan, seconds: float) -> MeshChoice:
    """A plan in one line."""
    mesh = plan.mesh
    return MeshChoice(
        mesh.pipeline, mesh.tensor, mesh.data, plan.microbatches, seconds=seconds,
        schedule=plan.schedule, vocabulary=plan.vocabulary.method if plan.vocabulary else None,
        recomputed=len(plan.recompute or ()), offload=plan.offload, zero=plan.zero,
        context=mesh.context, expert=mesh.expert,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Plainer:
    """A schedule and a vocabulary method; `key` bounds how plain a plan with them can be."""

    key: tuple[int, ...]
    schedule: str
    virtual_stages: int
    method: str

    def options(self, problem: Problem) -> Any:
        """The options that ask for them."""
        return dataclasses.replace(
            problem.options, schedule=self.schedule, virtual_stages=self.virtual_stages,
            vocabulary=self.method,
        )  # fmt: skip


def _plainer(problem: Problem, plan: Plan) -> list[Plainer]:
    """Combinations, open in the options, that may be plainer than the plan; plainest first."""
    auto = problem.options.schedule == "auto"
    methods = [choice.method for choice in choices_for(problem)]
    if problem.options.vocabulary != "auto":
        methods = [problem.options.vocabulary]
    plainer = []
    for candidate in candidates_for(problem, start(problem)) if auto else (plan,):
        for method in methods:
            key = (*plainness(candidate)[:3], False, method != "whole")
            name, stages = candidate.schedule or "", candidate.virtual_stages
            plainer.append(Plainer(key, name, stages, method))
    return sorted(plainer, key=lambda item: item.key)


def _is_tight(problem: Problem, plan: Plan, seconds: float) -> bool:
    """Whether memory excludes a plan that may be faster than `seconds`, and recomputes the same
    cheap operators as this one, and no blocks."""
    if plan.mesh.pipeline == 1 or plan.orders is not None:
        return False
    rank_problem, enough = local(problem, plan), (1 - GAIN) * seconds
    bare = dataclasses.replace(
        plan, recompute=None, stages=None, granularity=None, sent=None, solution=None, weighed=None
    )
    divided = {(x.schedule, x.virtual_stages) for x in plan.weighed or () if x.seconds is not None}
    return any(
        StagePass().is_tight(rank_problem, item, enough)  # cached
        if item is bare or (item.schedule, item.virtual_stages) in divided
        else is_forced(rank_problem, item)
        for item in (candidates_for(rank_problem, bare) if plan.weighed else [bare])
        if roomy_bound(rank_problem, item) < enough
    )


def _bounding(problem: Problem, passes: Sequence[Pass]) -> Bounding:
    """The lower bound on the step of a partial plan; 0 where none is known."""

    def bound(plan: Plan, enough: float) -> float:
        known = tuple(passes) == DEFAULT and problem.bench is None and is_known(problem)
        return least_step(problem, plan, enough) if known else 0.0

    return bound


def _completing(
    problem: Problem, passes: Sequence[Pass], bound: Bounding, observer: Observer
) -> Callable[[Plan, float], Plan]:
    """A function that completes a partial plan by running all passes. It may raise InfeasibleError
    where no step is shorter than `below` seconds.

    Where memory is short, it also tries selective recomputation of all blocks; if blocks are still
    recomputed, it tries to offload them instead.
    """

    def complete(plan: Plan, below: float) -> Plan:
        if problem.options.recompute != "auto" or plan.selective or tuple(passes) != DEFAULT:
            return decided(plan, below)
        selective = dataclasses.replace(plan, selective=True)
        trials = [plan, selective]
        if plan.zero is not None and problem.options.zero == "auto":
            trials.reverse()  # memory is short at this level: plain plans would recompute blocks
        if problem.may_offload:
            trials.append(dataclasses.replace(selective, offload=True))
        best = refusal = None
        for trial in trials:
            is_plain = trial is plan
            try:
                seconds = math.inf if best is None else step_of(problem, best)
                worth = seconds / (1 - GAIN) if is_plain else (1 - GAIN) * seconds
                if best is None:
                    if refusal and below < math.inf and bound(trial, below) >= below:
                        continue
                elif not (is_plain or best.recompute or _is_tight(problem, best, seconds)):
                    continue
                finished = decided(trial, min(below, worth))
                if best is None or step_of(problem, finished) <= worth:
                    best = finished
            except InfeasibleError as error:
                refusal = error if is_plain else refusal
            except PlanError:  # an order that never ends: the verifier says why
                if is_plain:
                    raise
        if best is None:
            assert refusal is not None
            raise refusal
        return best

    def decided(plan: Plan, below: float) -> Plan:
        current = problem
        for item in passes:
            if isinstance(item, VocabularyPass | SchedulePass):
                item = dataclasses.replace(item, below=min(item.below, below), floor=bound)
            with observer(f"pass {item.name}"):
                after = item.run(local(current, plan), plan)
            if tuple(passes) != DEFAULT:
                after = checked(current, item, plan, after)
            if type(item) not in BUILT_IN:
                current = _with_recompute(current, plan, after)
            plan = after
        check_finished(plan)
        check_host(problem, plan)
        return plan

    return complete


def _with_recompute(problem: Problem, before: Plan, after: Plan) -> Problem:
    """The problem in which the blocks that a user's pass recomputes are asked for: the passes
    behind it name them at the granularity of the stages."""
    if after.recompute == before.recompute or after.recompute is None or after.stages is not None:
        return problem
    wanted = dict.fromkeys(after.recompute, True) or "none"
    return dataclasses.replace(
        problem, options=dataclasses.replace(problem.options, recompute=wanted)
    )
