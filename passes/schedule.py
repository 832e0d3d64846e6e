"""Which schedule orders the micro-batches.

"auto" asks the stage pass what it would do under each schedule that may have the shortest step, and
takes the plainest of those that fit into memory from which no other would save more than `gain` of
the step, for what a simulation does not see (smaller pieces of work, more messages).

    even_step   zb-h2   zb-v | zb-h1  interleaved  1f1b  ...
    divided     2.67    2.59 |                              even then longer than 2.59: not divided
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar

from parcompiler.errors import InfeasibleError, InputError
from parcompiler.passes.base import Pass
from parcompiler.passes.estimate import estimate
from parcompiler.passes.even import even_step
from parcompiler.passes.stage import StagePass
from parcompiler.plan import Plan, Weighed
from parcompiler.problem import Problem
from parcompiler.schedules import SCHEDULES, Schedule, build, stages_per_rank
from parcompiler.schedules.planned import planned, trunk
from parcompiler.solver import UndecidedError

CANDIDATES = ("1f1b", "gpipe", "zb-h1", "interleaved", "zb-h2", "v-half", "v-min", "zb-v")
LARGE = 1500  # blocks times stages
TOO_LARGE = "does not fit the memory limit, however it is divided and recomputed"


@dataclass(frozen=True)
class SchedulePass(Pass):
    """Decides `plan.schedule`, `plan.virtual_stages` and, where no name says it, `plan.orders`.

    A step of `below` seconds is known: others are of no use.
    """

    name: ClassVar[str] = "schedule"
    gain: float = 0.01
    stages: StagePass = field(default_factory=StagePass)
    below: float = math.inf

    def run(self, problem: Problem, plan: Plan) -> Plan:
        """The schedule that was asked for, or the fastest that fits; the search starts there.

        Raises InfeasibleError where no step can be below the one that is known.
        """
        decided = self._chosen(problem, plan)
        if self.below < math.inf and decided.orders is None:
            least = even_step(problem, decided)
            if least >= self.below:
                raise InfeasibleError(_too_long(least))
        return decided

    def _chosen(self, problem: Problem, plan: Plan) -> Plan:
        """What was asked for or is fastest."""
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
        """The plainest candidate whose step is about as short as any, and all that were weighed."""
        candidates = list(_candidates(problem, plan))
        least = [even_step(problem, candidate) for candidate in candidates]
        found: dict[int, float] = {}
        refused: dict[int, Exception] = {}
        for k in self._order(least):
            if least[k] >= self.below or not self._may_win(k, least[k], found):
                continue
            try:
                divided = self.stages.run(_briefly(problem, candidates[k]), candidates[k])
            except (InfeasibleError, InputError, UndecidedError) as error:
                refused[k] = error
                continue
            found[k] = estimate(problem, divided).step_time
        if not found and self.below < math.inf:
            raise InfeasibleError(_too_long(min(least)))
        if not found:
            self.stages.run(problem, candidates[0])  # which says why
            raise refused[0]
        weighed = (
            Weighed(
                c.schedule or "", c.virtual_stages, found.get(k), _lost(k, least, found, refused)
            )
            for k, c in enumerate(candidates)
        )
        enough = min(found.values()) / (1 - self.gain)
        best = min(k for k, seconds in found.items() if seconds <= enough)
        return dataclasses.replace(candidates[best], weighed=tuple(weighed))

    def _order(self, least: Sequence[float]) -> list[int]:
        """The shortest even steps first; of those about as short, the plainest."""
        near = min(least) / (1 - self.gain)
        return sorted(range(len(least)), key=lambda k: (max(near, least[k]), k))

    def _may_win(self, k: int, least: float, found: Mapping[int, float]) -> bool:
        """Whether a candidate may be about as short as any, and save enough on a plainer one."""
        saved = 1 - self.gain
        return all(
            least < saved * seconds if other < k else saved * least <= seconds
            for other, seconds in found.items()
        )


def _lost(
    k: int, least: Sequence[float], found: Mapping[int, float], refused: Mapping[int, Exception]
) -> str | None:
    """Why a candidate was not divided, or could not be."""
    if k in found:
        return None
    if k in refused:
        return str(refused[k])
    return _too_long(least[k])


def _too_long(least: float) -> str:
    """Why even stages are not divided."""
    return TOO_LARGE if least == math.inf else f"even stages would take {least:.3g} s"


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
