"""What a plan that the user gives must be: made for this model and mesh, whole, and possible."""

from __future__ import annotations

import math
from collections.abc import Sequence

from parcompiler.capture.blocks import cut
from parcompiler.errors import PlanError
from parcompiler.options import METHODS, Options
from parcompiler.passes.decide import start
from parcompiler.passes.recompute import check_patterns, chosen
from parcompiler.passes.shard.local import local
from parcompiler.passes.shard.plan_entries import check_pins
from parcompiler.plan import VOCABULARY_PASSES, Plan
from parcompiler.problem import Problem
from parcompiler.schedules import Schedule
from parcompiler.schedules.planned import planned, trunk


def check_plan(problem: Problem, plan: Plan) -> None:
    """Refuse a plan that was made for another model, mesh or number of micro-batches."""
    given = start(problem)
    for name in ("model", "fingerprint", "mesh", "microbatches", "precision", "optimizer"):
        wanted, found = getattr(given, name), getattr(plan, name)
        if wanted != found:
            message = (
                f"the plan is of another {name} (plan: {found}, here: {wanted}); compile without "
                "plan= to make a new one"
            )
            raise PlanError(message)
    decisions = ["schedule", "granularity", "stages", "recompute"]
    decisions += ["sharding"] if problem.mesh.tensor > 1 else []
    missing = [n for n in decisions if getattr(plan, n) is None]
    if missing:
        message = f"the plan leaves {missing[0]!r} undecided"
        raise PlanError(message)
    _check_schedule(problem.options, plan)
    _check_vocabulary(problem.options, plan)
    own = local(problem, plan)
    check_pins(problem, plan)
    _check_costs(own, plan)
    _check_vocabulary_costs(plan)
    if plan.vocabulary_costs is not None:
        own.vocabulary_times[plan.vocabulary_costs.method] = plan.vocabulary_costs
    own.times.update({(granularity_of(plan), item.template): item for item in plan.costs or ()})
    _check_blocks(own, plan)
    _check_recompute(own, plan)


def _check_schedule(options: Options, plan: Plan) -> None:
    """Refuse a plan with another schedule than was asked for."""
    schedule, wanted = trunk(plan), options.schedule
    if isinstance(wanted, Schedule):
        if schedule != wanted:
            message = f"the plan has another schedule ({plan.schedule!r}) than {wanted.name!r}"
            raise PlanError(message)
    elif wanted not in ("auto", plan.schedule):
        message = f"the plan has schedule {plan.schedule!r} (asked for: {wanted!r})"
        raise PlanError(message)
    elif options.virtual_stages not in (1, plan.virtual_stages):
        message = (
            f"the plan has {plan.virtual_stages} stages on each rank (asked for: "
            f"{options.virtual_stages})"
        )
        raise PlanError(message)


def _check_vocabulary(options: Options, plan: Plan) -> None:
    """Refuse a plan with another way with the vocabulary than was asked for."""
    found = plan.vocabulary
    method = found.method if found else "whole"
    if method not in ("whole", *METHODS):
        message = f"the plan has vocabulary {method!r} (known: whole, {', '.join(METHODS)})"
        raise PlanError(message)
    able = method != "whole" or (found is not None and not found.kept)
    if options.vocabulary not in ("auto", method) and able:
        message = f"the plan has vocabulary {method!r} (asked for: {options.vocabulary!r})"
        raise PlanError(message)


def _check_blocks(problem: Problem, plan: Plan) -> None:
    """Refuse a plan whose stages do not hold each block of the model once."""
    if granularity_of(plan) not in problem.levels:
        known = ", ".join(map(str, problem.levels))
        message = f"the plan has granularity {plan.granularity} (the model has: {known})"
        raise PlanError(message)
    assert plan.stages is not None
    priced = problem.priced(granularity_of(plan))
    sent = tuple(node.name for node in priced.sent)
    if (plan.sent or ()) != sent:
        message = f"the plan has sent {plan.sent}; on this device it is {sent}, and not a choice"
        raise PlanError(message)
    wanted = [block.name for block in priced.cut.blocks]
    found = [name for choice in plan.stages for name in choice.blocks]
    for name in sorted(set(wanted) ^ set(found)) or _repeated(found):
        verb = "lacks" if name in wanted and name not in found else "misplaces"
        given = f" with vocabulary {plan.vocabulary.method!r}" if plan.vocabulary else ""
        message = f"the plan {verb} block {name!r} (blocks{given}: {', '.join(wanted)})"
        raise PlanError(message)
    ranks = tuple(choice.rank for choice in plan.stages)
    if ranks != planned(plan).placement:
        message = (
            f"the plan has stages on ranks {ranks}; its schedule {plan.schedule!r} has them on "
            f"{planned(plan).placement}"
        )
        raise PlanError(message)


def _check_costs(problem: Problem, plan: Plan) -> None:
    """Refuse measured times that are none, or not those of this model's templates."""
    if plan.costs is None or granularity_of(plan) not in problem.levels:
        return
    if not problem.mesh.is_uniform:
        message = "the plan has times measured on one device, and its mesh has several: remove them"
        raise PlanError(message)
    wanted = {block.template for block in cut(problem.graph, granularity_of(plan)).blocks}
    found = [item.template for item in plan.costs]
    for name in sorted(wanted ^ set(found)) or _repeated(found):
        message = f"the plan's costs and its blocks differ in template {name!r}: measure again"
        raise PlanError(message)
    for item in plan.costs:
        _check_seconds(item, ("forward", "backward", "weight"), f"costs of {item.template!r}")


def _check_vocabulary_costs(plan: Plan) -> None:
    """Refuse measured times of passes that are none, or not those of the plan's method."""
    costs = plan.vocabulary_costs
    if costs is None:
        return
    method = plan.vocabulary.method if plan.vocabulary else "whole"
    if costs.method != method:
        message = (
            f"the plan's vocabulary costs are of method {costs.method!r}, and its vocabulary is "
            f"{method!r}: measure again"
        )
        raise PlanError(message)
    _check_seconds(costs, VOCABULARY_PASSES, "vocabulary costs")


def _check_seconds(costs: object, fields: Sequence[str], what: str) -> None:
    """Refuse what cannot be seconds."""
    for field in fields:
        seconds = getattr(costs, field)
        if not 0 <= seconds < math.inf:
            message = f"the plan's {what} must have seconds as {field!r} ({seconds} found)"
            raise PlanError(message)


def _check_recompute(problem: Problem, plan: Plan) -> None:
    """Refuse a plan that recomputes what it cannot, or other blocks than was asked for."""
    priced, names = problem.priced(granularity_of(plan)), plan.recompute or ()
    known = [block.name for block in priced.cut.blocks]
    for name in names:
        if name not in priced.repeatable:
            why = "updates buffers, which must happen once" if name in known else "is no block"
            message = f"the plan recomputes {name!r}, which {why} (blocks: {', '.join(known)})"
            raise PlanError(message)
    wanted = problem.options.recompute
    if not isinstance(wanted, str):
        check_patterns(problem, wanted)
    if wanted != "auto":
        asked = chosen(problem, granularity_of(plan), wanted)
        for name in sorted(set(asked) ^ set(names)):
            verb = "keeps" if name in asked else "recomputes"
            message = f"the plan {verb} the activations of {name!r} (asked for: {wanted!r})"
            raise PlanError(message)


def _repeated(names: Sequence[str]) -> list[str]:
    """The names that appear more than once."""
    return sorted({name for name in names if names.count(name) > 1})


def granularity_of(plan: Plan) -> int:
    """The plan's granularity, decided by the stage pass."""
    if plan.granularity is None or plan.stages is None or plan.schedule is None:
        message = "the passes left the plan undecided: schedule and stage are needed"
        raise PlanError(message)
    return plan.granularity
