"""Which schedule orders the micro-batches.

"auto" takes 1F1B: of the schedules that exist so far it is as fast as GPipe (both leave a bubble
of p - 1 micro-batches), faster than naive, and keeps the fewest activations.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from parcompiler.passes.base import Pass
from parcompiler.plan import Plan
from parcompiler.problem import Problem


@dataclass(frozen=True)
class SchedulePass(Pass):
    """Decides `plan.schedule`."""

    name: ClassVar[str] = "schedule"

    def run(self, problem: Problem, plan: Plan) -> Plan:
        """The schedule that was asked for, or 1F1B."""
        wanted = problem.options.schedule
        return dataclasses.replace(plan, schedule="1f1b" if wanted == "auto" else wanted)
