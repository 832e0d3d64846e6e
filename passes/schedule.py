"""Which schedule orders the micro-batches.

"auto" divides the model under each schedule that may have the shortest step, and takes the plainest
schedule that fits into memory and is at most `gain` slower than the fastest. (Among nearly equal
plans `decide` takes the plainest.)

    even_step   zb-h2   zb-v | zb-h1  interleaved  1f1b  ...
    divided     2.67    2.59 |                              more than 2.59 even so: not divided

Large models get a quick division first, and a good one only within `DOUBT` of the shortest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar

from parcompiler.errors import InfeasibleError, InputError
from parcompiler.passes.base import GAIN, Pass
from parcompiler.passes.divide import spared
from parcompiler.passes.divide.runs import even_runs, lean_runs
from parcompiler.passes.estimate import alone, estimate
from parcompiler.passes.even import as_asked, even_bound, even_step, roomy_bound
from parcompiler.passes.forced import division_task, names_of
from parcompiler.passes.stage import StagePass, placed
from parcompiler.passes.zero import step_of
from parcompiler.plan import Plan, Weighed
from parcompiler.problem import Problem
from parcompiler.schedules import SCHEDULES, Schedule, build, stages_per_rank
from parcompiler.schedules.planned import outline, trunk
from parcompiler.solver import UndecidedError

CANDIDATES = ("1f1b", "gpipe", "zb-h1", "interleaved", "zb-h2", "v-half", "v-min", "zb-v")
LARGE = 500  # blocks times stages: from here on the best stages take up to seconds to find
DOUBT = 0.15  # by so much the best stages may be better than quick ones: of 106 of GPTs, 0.14 were
TOO_LARGE = "does not fit the memory limit, however it is divided and recomputed"


@dataclass(frozen=True)
class SchedulePass(Pass):
    """Decides `plan.schedule`, `plan.virtual_stages` and, where no name says it, `plan.orders`.

    A step of `below` seconds is known: slower ones are of no use.
    """

    name: ClassVar[str] = "schedule"
    gain: float = GAIN
    stages: StagePass = field(default_factory=StagePass)
    below: float = math.inf

    def run(self, problem: Problem, plan: Plan) -> Plan:
        """The schedule asked for, or the fastest that fits, from which a search of orders starts.

        Raises InfeasibleError where no step can be shorter than the known one.
        """
        decided = self._chosen(problem, plan)
        if self.below < math.inf and decided.orders is None:
            least = even_step(problem, decided)
            if least >= self.below:
                raise InfeasibleError(_too_long(least))
            quick = self.quick_step(problem, decided) if _is_large(problem, decided) else None
            if quick is not None and (1 - DOUBT) * quick >= self.below:
                raise InfeasibleError(_too_slow(quick))
        return decided

    def quick_step(self, problem: Problem, plan: Plan) -> float | None:
        """Seconds of the quick division, or a lower bound of it that is too long already."""
        return quick_step(problem, plan, self.below / (1 - DOUBT))

    def _chosen(self, problem: Problem, plan: Plan) -> Plan:
        """The schedule asked for, or the fastest."""
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
        """The plainest candidate within the margin of the shortest, and all that were weighed."""
        weighing = Weighing(self, problem, tuple(candidates_for(problem, plan)))
        order = weighing.order()
        for k in filter(weighing.is_worth_it, order):
            weighing.divide(k)
        if not weighing.found and self.below < math.inf:
            raise InfeasibleError(weighing.reason(weighing.nearest()))
        if not weighing.found:  # finer blocks may fit, and quick stages may have misled
            for k in (k for k in order if k not in weighing.refused):
                weighing.divide(k)
        if not weighing.found:
            self.stages.run(problem, weighing.candidates[0])  # which says why
            raise weighing.refused[0]
        return weighing.chosen()


@dataclass
class Weighing:
    """What is known of the candidate schedules, plainest first."""

    asked: SchedulePass
    problem: Problem
    candidates: tuple[Plan, ...]
    least: list[float] = field(init=False)  # seconds of even stages
    quick: dict[int, float] = field(default_factory=dict)  # of stages that are quickly found
    found: dict[int, float] = field(default_factory=dict)  # of the best stages
    refused: dict[int, Exception] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Estimate each candidate with even stages."""
        self.least = [self._even(candidate) for candidate in self.candidates]

    def _even(self, candidate: Plan) -> float:
        """Seconds of even stages, or a lower bound of it that is too long already."""
        for bound in (roomy_bound, even_bound):
            seconds = bound(self.problem, candidate)
            if seconds >= self.asked.below:
                return seconds
        return even_step(self.problem, candidate)

    def order(self) -> list[int]:
        """Candidates by estimated step; within the margin, the plainest first."""
        expected = list(self.least)
        for k in sorted(range(len(expected)), key=expected.__getitem__):
            if _is_large(self.problem, self.candidates[k]) and self._may_win(k, self.quick):
                quick = self.asked.quick_step(self.problem, self.candidates[k])
                if quick is not None:
                    self.quick[k] = expected[k] = quick
        near = min(expected) / (1 - self.asked.gain)
        return sorted(range(len(expected)), key=lambda k: (max(near, expected[k]), k))

    def is_worth_it(self, k: int) -> bool:
        """Whether a candidate may still be chosen, by what is known so far."""
        known = min(self.asked.below, *self.quick.values(), *self.found.values(), math.inf)
        return self._may_win(k, self.found) and (1 - DOUBT) * self.quick.get(k, 0) < known

    def divide(self, k: int) -> None:
        """Divide the model under a candidate."""
        candidate = self.candidates[k]
        try:
            divided = self.asked.stages.run(_briefly(self.problem, candidate), candidate)
        except (InfeasibleError, InputError, UndecidedError) as error:
            self.refused[k] = error
            return
        self.found[k] = step_of(self.problem, divided)

    def chosen(self) -> Plan:
        """The plainest plan within the margin of the shortest, with all that were weighed."""
        enough = min(self.found.values()) / (1 - self.asked.gain)
        best = min(k for k, seconds in self.found.items() if seconds <= enough)
        weighed = (
            Weighed(c.schedule or "", c.virtual_stages, self.found.get(k), self.reason(k))
            for k, c in enumerate(self.candidates)
        )
        return dataclasses.replace(self.candidates[best], weighed=tuple(weighed))

    def reason(self, k: int) -> str | None:
        """Why a candidate was not divided, or could not be."""
        if k in self.found:
            return None
        if k in self.refused:
            return str(self.refused[k])
        return _too_slow(self.quick[k]) if k in self.quick else _too_long(self.least[k])

    def nearest(self) -> int:
        """The candidate with the shortest estimate."""
        return min(range(len(self.least)), key=lambda k: self.quick.get(k, self.least[k]))

    def _may_win(self, k: int, found: Mapping[int, float]) -> bool:
        """Whether a candidate may be within the margin of the shortest and save enough over plainer
        ones."""
        saved, least = 1 - self.asked.gain, self.least[k]
        return least < self.asked.below and all(
            least < saved * seconds if other < k else saved * least <= seconds
            for other, seconds in found.items()
        )


def _too_long(least: float) -> str:
    """Why even stages are not divided."""
    return TOO_LARGE if least == math.inf else f"even stages would take {_in_units(least)}"


def _too_slow(quick: float) -> str:
    """Why a schedule got a quick division only."""
    return f"about {_in_units(quick)}, with stages that are quickly found"


def _in_units(seconds: float) -> str:
    """Seconds with three digits and a unit.

    >>> _in_units(2.674), _in_units(0.00577)
    ('2.67 s', '5.77 ms')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _is_large(problem: Problem, plan: Plan) -> bool:
    """Whether a good division takes seconds to compute."""
    blocks, stages = len(problem.priced(problem.levels[0]).cut.blocks), len(outline(plan).placement)
    return blocks * stages > LARGE


def _briefly(problem: Problem, plan: Plan) -> Problem:
    """The problem; for large models without the costly explanation of refusals."""
    if not problem.explain or not _is_large(problem, plan):
        return problem
    return dataclasses.replace(problem, explain=False)


def quick_step(problem: Problem, plan: Plan, below: float = math.inf) -> float | None:
    """Seconds of a step with the quick division, into even stages; None where it does not fit.

    The stage pass finds better stages, but takes a second for a large model and schedule. The order
    of the schedules hardly depends on that: one whose quick division is far slower than another's
    good one loses with a good division too.

    Where the stages alone take `below` seconds or more, it is their time, without a vocabulary on
    all ranks.
    """
    level = problem.levels[0]
    trial = as_asked(problem, plan, level)
    task = division_task(problem, trial, level)
    if task.stages > len(task.loads):
        return None
    for start in (even_runs, lean_runs):
        stage_of = start(task)
        twice = spared(task, stage_of)
        if twice is not None:
            names = (*(trial.recompute or ()), *names_of(problem, level, twice))
            found = dataclasses.replace(trial, recompute=names)
            trial = placed(problem, found, level, stage_of)
            least = alone(problem, trial) if below < math.inf else 0.0
            return least if least >= below else estimate(problem, trial).step_time
    return None


def candidates_for(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The schedules that "auto" chooses from, with the number of stages asked for."""
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
    build(name, plan.mesh.pipeline, 1, virtual_stages)  # as many as there are may be thousands
    return dataclasses.replace(plan, schedule=name, virtual_stages=virtual_stages)


def _given(plan: Plan, schedule: Schedule) -> Plan:
    """The plan with a user's own schedule."""
    virtual_stages = max(map(schedule.placement.count, range(schedule.ranks)))
    if schedule.name in SCHEDULES:
        with suppress(InputError):  # it may not be what its name says
            named = _named(plan, schedule.name, virtual_stages)
            if trunk(named) == schedule:
                return named
    return dataclasses.replace(
        plan, schedule=schedule.name, virtual_stages=virtual_stages, orders=schedule.cells()
    )
