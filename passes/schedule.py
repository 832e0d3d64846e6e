"""Which schedule orders the micro-batches.

"auto" asks the stage pass what it would do under each schedule and takes the shortest step that
fits into memory. Candidates are listed from the plainest; one further down must save more than
`gain` of the step, for what a simulation does not see (smaller pieces of work, more messages).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar

from parcompiler.errors import InfeasibleError, InputError
from parcompiler.passes.base import Pass
from parcompiler.passes.estimate import estimate
from parcompiler.passes.stage import StagePass, ideal
from parcompiler.plan import Plan, Weighed
from parcompiler.problem import Problem
from parcompiler.schedules import SCHEDULES, Schedule, build, stages_per_rank
from parcompiler.schedules.planned import planned, trunk
from parcompiler.solver import UndecidedError

CANDIDATES = ("1f1b", "gpipe", "zb-h1", "interleaved", "zb-h2", "v-half", "v-min", "zb-v")
LARGE = 1500  # blocks times stages


@dataclass(frozen=True)
class SchedulePass(Pass):
    """Decides `plan.schedule`, `plan.virtual_stages` and, where no name says it, `plan.orders`."""

    name: ClassVar[str] = "schedule"
    gain: float = 0.01
    stages: StagePass = field(default_factory=StagePass)

    def run(self, problem: Problem, plan: Plan) -> Plan:
        """The schedule that was asked for, or the fastest that fits; the search starts there."""
        wanted = problem.options.schedule
        if plan.schedule is not None:
            return plan
        if isinstance(wanted, Schedule):
            return _given(plan, wanted)
        if wanted == "auto":
            return self._fastest(problem, plan)
        if wanted == "search":
            best = self._fastest(problem, plan)
            return dataclasses.replace(best, schedule=wanted, orders=trunk(best).cells())
        return _named(plan, wanted, problem.options.virtual_stages)

    def _fastest(self, problem: Problem, plan: Plan) -> Plan:
        """The candidate with the shortest step that fits, and all that were weighed."""
        best: tuple[float, Plan] | None = None
        refusal: InfeasibleError | InputError | UndecidedError | None = None
        weighed: list[Weighed] = []
        for candidate in _candidates(problem, plan):
            name, stages = candidate.schedule or "", candidate.virtual_stages
            try:
                divided = self.stages.run(_briefly(problem, candidate), candidate)
            except (
                InfeasibleError,
                InputError,
                UndecidedError,
            ) as error:  # of the plainest, if all fail
                refusal = refusal or error
                weighed.append(Weighed(name, stages, None, str(error)))
                continue
            seconds = estimate(problem, divided).step_time
            weighed.append(Weighed(name, stages, seconds))
            if best is None or seconds < (1 - self.gain) * best[0]:
                best = seconds, candidate
            if best[0] * (1 - self.gain) <= ideal(problem, divided):
                break  # no schedule can save more than that
        if best is None:
            assert refusal is not None
            first = next(_candidates(problem, plan))
            self.stages.run(problem, first)  # which says why
            raise refusal
        return dataclasses.replace(best[1], weighed=tuple(weighed))


def _briefly(problem: Problem, plan: Plan) -> Problem:
    """The problem, without a search for what would do where it takes seconds for each schedule."""
    blocks, stages = len(problem.priced(problem.levels[0]).cut.blocks), len(planned(plan).placement)
    if blocks * stages <= LARGE or not problem.explain:
        return problem
    return dataclasses.replace(problem, explain=False)


def _candidates(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """What "auto" chooses from: all that have as many stages as were asked for."""
    ranks, wanted, counts = (
        plan.mesh.pipeline,
        problem.options.virtual_stages,
        problem.options.stages,
    )
    if isinstance(counts, tuple) and wanted == 1 and len(counts) % ranks == 0:
        wanted = len(counts) // ranks
    for name in CANDIDATES if ranks > 1 else CANDIDATES[:1]:
        with suppress(InputError):  # it cannot have so many stages on a rank
            candidate = _named(plan, name, wanted)
            if not isinstance(counts, tuple) or candidate.virtual_stages == wanted:
                yield candidate


def _named(plan: Plan, name: str, wanted: int) -> Plan:
    """The plan with a named schedule. Raises InputError for stages that it cannot have."""
    virtual_stages = stages_per_rank(name, wanted)
    build(name, plan.mesh.pipeline, plan.microbatches, virtual_stages)
    return dataclasses.replace(plan, schedule=name, virtual_stages=virtual_stages)


def _given(plan: Plan, schedule: Schedule) -> Plan:
    """The plan with a schedule that the user made."""
    virtual_stages = max(map(schedule.placement.count, range(schedule.ranks)))
    if schedule.name in SCHEDULES:
        with suppress(InputError):  # it may not be what its name says
            named = _named(plan, schedule.name, virtual_stages)
            if trunk(named) == schedule:
                return named
    return dataclasses.replace(
        plan, schedule=schedule.name, virtual_stages=virtual_stages, orders=schedule.cells()
    )
