"""The schedule that a plan names, or holds."""

from __future__ import annotations

from parcompiler.errors import PlanError
from parcompiler.plan import Plan
from parcompiler.schedules import SCHEDULES, build
from parcompiler.schedules.schedule import Schedule
from parcompiler.schedules.vocabulary import spread


def planned(plan: Plan) -> Schedule:
    """The order of compute under `plan`, with the head where all ranks share it.

    Raises PlanError as `trunk` does.
    """
    choice, schedule = plan.vocabulary, trunk(plan)
    if choice is None or not choice.spread or choice.head is None:
        return schedule
    return spread(schedule, choice.method)


def trunk(plan: Plan) -> Schedule:
    """The order of what stages compute under `plan`, as the schedule has it by itself.

    Raises PlanError when the schedule is undecided, unknown, or of another size than the plan.
    """
    if plan.schedule is None:
        message = "the plan leaves 'schedule' undecided"
        raise PlanError(message)
    if plan.orders is None:
        if plan.schedule not in SCHEDULES:
            message = (
                f"the plan has schedule {plan.schedule!r} without its orders (known by name: "
                f"{', '.join(SCHEDULES)})"
            )
            raise PlanError(message)
        return build(plan.schedule, plan.mesh.pipeline, plan.microbatches, plan.virtual_stages)
    schedule = Schedule.parse(plan.schedule, plan.orders)
    check_size(schedule, plan.mesh.pipeline, plan.microbatches)
    return schedule


def check_size(schedule: Schedule, ranks: int, microbatches: int) -> None:
    """Raise PlanError unless a schedule has this many ranks and micro-batches."""
    found = schedule.ranks, schedule.microbatches
    if found != (ranks, microbatches):
        message = (
            f"the schedule {schedule.name!r} is for {found[0]} ranks and {found[1]} micro-batches, "
            f"the plan has pipeline={ranks} and microbatches={microbatches}"
        )
        raise PlanError(message)
