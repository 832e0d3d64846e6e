"""The order of compute that schedule="search" asks for: searched for the stages as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from parcompiler.errors import InputError
from parcompiler.passes.base import Pass
from parcompiler.passes.estimate import costs, messages
from parcompiler.passes.search import EFFORT, search
from parcompiler.plan import Plan, Solution
from parcompiler.problem import Problem
from parcompiler.schedules import SCHEDULES, Schedule, build
from parcompiler.schedules.planned import planned


@dataclass(frozen=True)
class OrderPass(Pass):
    """Decides `plan.orders` and `plan.search`; `effort` limits the search."""

    name: ClassVar[str] = "order"
    effort: float = EFFORT

    def run(self, problem: Problem, plan: Plan) -> Plan:
        """The shortest order found, never longer than a named schedule with these stages."""
        if plan.schedule != "search":
            return plan
        limits = [float(problem.device.memory)] * plan.mesh.pipeline
        found = search(
            tuple(_named(plan)), costs(problem, plan), messages(problem, plan), limits, self.effort
        )
        return dataclasses.replace(
            plan,
            orders=found.schedule.cells(),
            search=Solution(found.status, found.step_time, found.bound, found.gap),
        )


def _named(plan: Plan) -> Iterator[Schedule]:
    """The schedules with the plan's stages, the one that it was divided for first."""
    placement = planned(plan).placement
    yield planned(plan)
    for name in SCHEDULES:
        try:
            schedule = build(name, plan.mesh.pipeline, plan.microbatches, plan.virtual_stages)
        except InputError:
            continue  # it cannot have so many stages on a rank
        if schedule.placement == placement and not schedule.asynchronous:
            yield schedule
