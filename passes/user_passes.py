"""A user's own passes: the plan that one returns is checked before the next pass reads it.

A plan file that a user edits goes through the same checks of its blocks (see `checks`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from parcompiler.errors import ParcompilerError, PlanError, shown
from parcompiler.options import METHODS
from parcompiler.passes.base import Pass
from parcompiler.passes.shard.local import local
from parcompiler.plan import Plan
from parcompiler.problem import Problem
from parcompiler.schedules.planned import planned, trunk

# Fields that say what a plan is for: no pass decides them.
FIXED = """
    model fingerprint mesh microbatches precision optimizer context updates version
""".split()


def checked(problem: Problem, item: Pass, before: Plan, after: object) -> Plan:
    """The plan `after` a pass that began with the plan `before`; `problem` is that of the model.

    Lists are tuples in it, and the number of stages on a rank is that of its schedule. Raises
    PlanError or InputError, with the name of the pass, for what no later pass could go on with.
    """
    try:
        if not isinstance(after, Plan):
            message = f"a pass must return a Plan ({shown(after)} returned)"
            raise PlanError(message)
        return _valid(problem, before, after)
    except ParcompilerError as error:
        error.add_note(f"(the plan is that of the pass {item.name!r}, {type(item).__name__})")
        raise


def _valid(problem: Problem, before: Plan, after: Plan) -> Plan:
    """`checked`, for a plan."""
    try:
        plan = Plan.from_json(after.to_json())
    except TypeError as error:
        message = f"a field of the plan has a value of a wrong type ({error})"
        raise PlanError(message) from error
    for name in FIXED:
        new, old = getattr(plan, name), getattr(before, name)
        if new != old:
            message = (
                f"a pass must not change the plan's {name!r}, which is given "
                f"({shown(new, 200)} in place of {shown(old, 200)})"
            )
            raise PlanError(message)
    check_method(plan)
    rank_problem = local(problem, plan)
    if plan.schedule is not None:
        plan = dataclasses.replace(plan, virtual_stages=trunk(plan).virtual_stages)
    if plan.stages is not None:
        check_blocks(rank_problem, plan)
    check_recomputed(rank_problem, plan)
    return plan


def check_method(plan: Plan) -> None:
    """Refuse a method for the vocabulary that does not exist."""
    method = plan.vocabulary.method if plan.vocabulary else "whole"
    if method not in ("whole", *METHODS):
        message = f"the plan has vocabulary {shown(method)} (known: whole, {', '.join(METHODS)})"
        raise PlanError(message)


def check_blocks(problem: Problem, plan: Plan) -> None:
    """Refuse a plan whose stages do not hold each block of the model once."""
    assert plan.stages is not None
    if plan.granularity is None or plan.granularity not in problem.levels:
        known = ", ".join(map(str, problem.levels))
        patterns = not isinstance(problem.options.recompute, str)
        message = (
            f"the plan has granularity {plan.granularity} (the model has: {known}"
            f"{', where recompute= names blocks' if patterns else ''})"
        )
        raise PlanError(message)
    priced = problem.priced(plan.granularity)
    sent = tuple(node.name for node in priced.sent)
    if (plan.sent or ()) != sent:
        message = (
            f"the plan has sent {shown(plan.sent, 200)}; on this device it is {sent}, and not a "
            "choice"
        )
        raise PlanError(message)
    blocks = [block.name for block in priced.cut.blocks]
    planned_blocks = [name for choice in plan.stages for name in choice.blocks]
    for name in sorted(set(blocks) ^ set(planned_blocks)) or repeated(planned_blocks):
        verb = "lacks" if name in blocks and name not in planned_blocks else "misplaces"
        method = f" with vocabulary {shown(plan.vocabulary.method)}" if plan.vocabulary else ""
        message = f"the plan {verb} block {shown(name, 200)} (blocks{method}: {', '.join(blocks)})"
        raise PlanError(message)
    ranks = tuple(choice.rank for choice in plan.stages)
    if plan.schedule is not None and ranks != planned(plan).placement:
        message = (
            f"the plan has stages on ranks {ranks}; its schedule {shown(plan.schedule)} has them "
            f"on {planned(plan).placement}"
        )
        raise PlanError(message)


def check_recomputed(problem: Problem, plan: Plan) -> None:
    """Refuse to recompute what is no block, or must run once."""
    level = problem.levels[0] if plan.granularity is None else plan.granularity
    priced = problem.priced(level)
    known = [block.name for block in priced.cut.blocks]
    for name in plan.recompute or ():
        if name not in (known if plan.offload else priced.repeatable):
            why = "updates buffers, which must happen once" if name in known else "is no block"
            message = (
                f"the plan recomputes {shown(name, 200)}, which {why} (blocks: {', '.join(known)})"
            )
            raise PlanError(message)
    for name in repeated(plan.recompute or ()):
        message = f"the plan recomputes {shown(name)} twice"
        raise PlanError(message)


def repeated(names: Sequence[str]) -> list[str]:
    """The names that appear more than once."""
    return sorted({name for name in names if names.count(name) > 1})


def undecided(plan: Plan) -> list[str]:
    """The fields that a finished plan needs and this one lacks."""
    needed = ["schedule", "granularity", "stages", "recompute"]
    needed += ["sharding"] if plan.mesh.tensor > 1 else []
    return [name for name in needed if getattr(plan, name) is None]


def check_finished(plan: Plan) -> None:
    """Refuse a plan that the passes left undecided, which could not be used again either."""
    if missing := undecided(plan):
        message = (
            f"the passes left the plan undecided (it lacks {', '.join(missing)}): give passes= "
            "that decide these, too, as those of passes.DEFAULT do"
        )
        raise PlanError(message)


def granularity_of(plan: Plan) -> int:
    """The granularity of a finished plan."""
    assert plan.granularity is not None, "check_finished refuses others"
    return plan.granularity
