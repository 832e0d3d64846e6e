"""The order of compute of schedule="search": found by search, for stages that are decided.

With a vocabulary on all ranks the order of the stages alone is searched, within the memory that the
vocabulary and the activations it keeps longer leave, and the vocabulary's passes are inserted as
into any schedule. The order is taken where it makes the whole step shorter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from parcompiler.errors import InfeasibleError, InputError
from parcompiler.passes.base import Pass
from parcompiler.passes.estimate import costs, estimate, messages, update_seconds
from parcompiler.passes.search import EFFORT, SearchResult, search
from parcompiler.passes.spread import vocabulary_cost
from parcompiler.passes.stage import ideal
from parcompiler.plan import Plan, Solution
from parcompiler.problem import Problem
from parcompiler.schedules import SCHEDULES, Schedule, build
from parcompiler.schedules.planned import outline, trunk
from parcompiler.schedules.vocabulary import intervals
from parcompiler.solver import relative_gap
from parcompiler.timeline import Timing, VocabularyCost


@dataclass(frozen=True)
class OrderPass(Pass):
    """Decides `plan.orders` and `plan.search`; `effort` limits the search."""

    name: ClassVar[str] = "order"
    effort: float = EFFORT

    def run(self, problem: Problem, plan: Plan) -> Plan:
        """The shortest order found, never slower than a named schedule with these stages."""
        if plan.schedule != "search":
            return plan
        spread = vocabulary_cost(problem, plan)
        if spread is not None:
            return self._beside(problem, plan, spread)
        result = self._found(problem, plan, list(map(float, problem.memories)))
        update = update_seconds(problem, plan)
        seconds, bound = result.step_time + update, result.bound + update
        solution = Solution(result.status, seconds, bound, relative_gap(seconds, bound))
        return dataclasses.replace(plan, orders=result.schedule.cells(), search=solution)

    def _found(self, problem: Problem, plan: Plan, limits: Sequence[float]) -> SearchResult:
        """The best order of the stages in this memory."""
        named = tuple(_named_schedules(plan))
        return search(named, costs(problem, plan), messages(problem, plan), limits, self.effort)

    def _beside(self, problem: Problem, plan: Plan, spread: VocabularyCost) -> Plan:
        """The better of the plan's order and one found for the stages alone."""
        tried = [plan]
        with suppress(InfeasibleError):
            result = self._found(problem, plan, list(_bytes_for_stages(problem, plan, spread)))
            tried.append(dataclasses.replace(plan, orders=result.schedule.cells()))
        steps = [estimate(problem, item) for item in tried]
        fitting = [k for k, step in enumerate(steps) if _fits(problem, step)]
        best = min(fitting, key=lambda k: steps[k].step_time, default=0)
        seconds, bound = steps[best].step_time, ideal(problem, plan)
        gap = relative_gap(seconds, bound)
        return dataclasses.replace(tried[best], search=Solution("feasible", seconds, bound, gap))


def _fits(problem: Problem, step: Timing) -> bool:
    """Whether a step fits into the memory of all ranks."""
    return all(peak <= size for peak, size in zip(step.peak_memory, problem.memories, strict=True))


def _bytes_for_stages(problem: Problem, plan: Plan, spread: VocabularyCost) -> Iterator[float]:
    """Bytes of each rank that the vocabulary leaves for the stages. Their backwards wait for its
    passes, so that more micro-batches are in flight."""
    schedule, stage_costs = trunk(plan), costs(problem, plan)
    more = intervals(spread.method, schedule.ranks)
    for rank in range(schedule.ranks):
        saved = sum(stage_costs[j].saved for j, at in enumerate(schedule.placement) if at == rank)
        free = problem.memories[rank] - spread.resident - spread.saved - more * saved
        yield float(max(1, free))


def _named_schedules(plan: Plan) -> Iterator[Schedule]:
    """The named schedules with the plan's number of stages, its own first."""
    placement = outline(plan).placement
    yield trunk(plan)
    for name in SCHEDULES:
        try:
            schedule = build(name, plan.mesh.pipeline, plan.microbatches, plan.virtual_stages)
        except InputError:
            continue  # this schedule cannot have that many stages on a rank
        if schedule.placement == placement and not schedule.asynchronous:
            yield schedule
