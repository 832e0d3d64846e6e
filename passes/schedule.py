"""Choose the schedule: the order in which each rank computes the micro-batches.

"auto" divides the model under each schedule that may have the shortest step, and takes the plainest
schedule that fits into memory and is at most `gain` slower than the fastest. (Among nearly equal
plans `decide` takes the plainest.)

    even_step   zb-h2   zb-v | zb-h1  interleaved  1f1b  ...
    divided     2.67    2.59 |                              even stages take more: not divided
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar

from parcompiler.errors import InfeasibleError, InputError
from parcompiler.passes.base import GAIN, Bounding, Pass, unbounded
from parcompiler.passes.even import even_step, is_forced, roomy_bound, shared_step
from parcompiler.passes.exchange import step_of
from parcompiler.passes.stage import StagePass
from parcompiler.plan import Plan, Weighed
from parcompiler.problem import Problem
from parcompiler.schedules import SCHEDULES, Schedule, build, stages_per_rank
from parcompiler.schedules.planned import outline, trunk
from parcompiler.solver import UndecidedError

CANDIDATES = ("1f1b", "gpipe", "zb-h1", "interleaved", "zb-h2", "v-half", "v-min", "zb-v")
MOST_STAGES = 8  # stages on a rank, of the interleaved schedules that are weighed
TOO_LARGE = "does not fit the memory limit, however it is divided and recomputed"


@dataclass(frozen=True)
class SchedulePass(Pass):
    """Decides `plan.schedule`, `plan.virtual_stages` and, for orders without a name, `plan.orders`.

    A step of `below` seconds is known: slower ones are of no use. `floor` is a lower bound on the
    steps of a schedule over all levels of ZeRO.
    """

    name: ClassVar[str] = "schedule"
    gain: float = GAIN
    stages: StagePass = field(default_factory=StagePass)
    below: float = math.inf
    floor: Bounding = unbounded

    def run(self, problem: Problem, plan: Plan) -> Plan:
        """The requested schedule, or the fastest that fits, from which a search of orders starts.

        Raises InfeasibleError where no step can be shorter than the known one.
        """
        decided = self._chosen(problem, plan)
        if self.below < math.inf and decided.orders is None:
            least = even_step(problem, decided)
            if least >= self.below:
                raise InfeasibleError(_too_long(least))
        return decided

    def _chosen(self, problem: Problem, plan: Plan) -> Plan:
        """The requested schedule, or the fastest."""
        wanted = problem.options.schedule
        if plan.schedule is not None:
            return plan
        if isinstance(wanted, Schedule):
            return _with_own_schedule(plan, wanted)
        if wanted == "auto":
            return self._fastest(problem, plan)
        if wanted == "search":
            best = self._fastest(problem, plan)
            return dataclasses.replace(best, schedule=wanted, orders=trunk(best).cells())
        return _with_named_schedule(plan, wanted, problem.options.virtual_stages)

    def _fastest(self, problem: Problem, plan: Plan) -> Plan:
        """The plainest candidate within the margin of the shortest, and all that were weighed."""
        candidates = tuple(candidates_for(problem, plan))
        if not candidates and plan.stages is not None:
            ranks = tuple(choice.rank for choice in plan.stages)
            message = (
                f"schedule='auto' weighs none whose stages are on ranks {ranks}: let the pass that "
                "decided them decide the schedule too"
            )
            raise InfeasibleError(message)
        if not candidates:
            wanted = problem.options.virtual_stages
            message = (
                "schedule='auto' weighs none with several stages on a rank for a pipeline of "
                f"{plan.mesh.pipeline} (virtual_stages={wanted} given): leave virtual_stages out, "
                "or take more pipeline ranks, or schedule='interleaved'"
            )
            raise InfeasibleError(message)
        weighing = Weighing(self, problem, candidates)
        order = weighing.order()
        for k in filter(weighing.may_win, order):
            weighing.divide(k)
        if not weighing.seconds and self.below < math.inf:
            raise InfeasibleError(weighing.reason(weighing.nearest()))
        if not weighing.seconds:  # finer blocks may fit
            for k in (k for k in order if k not in weighing.refused):
                weighing.divide(k)
        if not weighing.seconds:
            self.stages.run(problem, weighing.candidates[0])  # which says why
            raise weighing.refused[0]
        return weighing.chosen()


@dataclass
class Weighing:
    """The candidate schedules, plainest first, and their steps so far."""

    asked: SchedulePass
    problem: Problem
    candidates: tuple[Plan, ...]
    least: list[float] = field(init=False)  # seconds of a step with even stages
    seconds: dict[int, float] = field(default_factory=dict)  # seconds with the best stages
    refused: dict[int, Exception] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Estimate each candidate with even stages."""
        self.least = [self._even(candidate) for candidate in self.candidates]

    def _even(self, candidate: Plan) -> float:
        """Seconds of a step with even stages, or a lower bound of it that is already too long.

        Where parameters are gathered, only compute counts: gathers go on while stages wait for each
        other, and schedules differ in how long they wait.
        """
        below = self.asked.below
        problem = self.problem.at_zero("auto") if self.problem.gathers else self.problem
        for bound in (roomy_bound, even_step):
            if (least := bound(problem, candidate)) >= below:
                return least
        if below == math.inf:
            return least
        least, floor = shared_step(problem, candidate), self.asked.floor(candidate, below)
        return floor if floor >= below else least  # the other estimates have no level of ZeRO yet

    def order(self) -> list[int]:
        """Candidates by their step with even stages; within the margin, the plainest first."""
        near = min(self.least) / (1 - self.asked.gain)
        return sorted(range(len(self.least)), key=lambda k: (max(near, self.least[k]), k))

    def divide(self, k: int) -> None:
        """Divide the model under a candidate."""
        candidate = self.candidates[k]
        try:
            divided = self._stages.run(self.problem, candidate)
        except (InfeasibleError, InputError, UndecidedError) as error:
            self.refused[k] = error
            return
        self.seconds[k] = step_of(self.problem, divided)

    @property
    def _stages(self) -> StagePass:
        """The pass that divides; it stops at `below` unless refusals must be explained."""
        below = math.inf if self.problem.explain else self.asked.below
        return dataclasses.replace(self.asked.stages, below=below)

    def chosen(self) -> Plan:
        """The plainest plan within the margin of the shortest, with all that were weighed."""
        enough = min(self.seconds.values()) / (1 - self.asked.gain)
        best = min(k for k, seconds in self.seconds.items() if seconds <= enough)
        weighed = (
            Weighed(c.schedule or "", c.virtual_stages, self.seconds.get(k), self.reason(k))
            for k, c in enumerate(self.candidates)
        )
        return dataclasses.replace(self.candidates[best], weighed=tuple(weighed))

    def reason(self, k: int) -> str | None:
        """Why a candidate was not divided, or could not be."""
        if k in self.seconds:
            return None
        return str(self.refused[k]) if k in self.refused else _too_long(self.least[k])

    def nearest(self) -> int:
        """The candidate with the shortest step of even stages."""
        return min(range(len(self.least)), key=self.least.__getitem__)

    def may_win(self, k: int) -> bool:
        """Whether a candidate may be within the margin of the shortest and save enough over plainer
        ones, by what is known so far."""
        saved, least = 1 - self.asked.gain, self.least[k]
        return least < self.asked.below and all(
            least < saved * seconds if other < k else saved * least <= seconds
            for other, seconds in self.seconds.items()
        )


def _too_long(least: float) -> str:
    """Why even stages are not divided."""
    return TOO_LARGE if least == math.inf else f"even stages would take {_in_units(least)}"


def _in_units(seconds: float) -> str:
    """Seconds with three digits and a unit.

    >>> _in_units(2.674), _in_units(0.00577)
    ('2.67 s', '5.77 ms')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def candidates_for(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The schedules that "auto" chooses from, with the requested number of stages."""
    ranks, wanted, counts = (
        plan.mesh.pipeline,
        problem.options.virtual_stages,
        problem.options.stages,
    )
    places = None if plan.stages is None else tuple(choice.rank for choice in plan.stages)
    if places is not None:  # a user's pass decided them
        counts, wanted = places, 1
    if isinstance(counts, tuple) and wanted == 1 and len(counts) % ranks == 0:
        wanted = len(counts) // ranks
    for name in CANDIDATES if ranks > 1 else CANDIDATES[:1]:
        with suppress(InputError):  # it cannot have that many stages on a rank
            candidate = _with_named_schedule(plan, name, wanted)
            if places is not None and outline(candidate).placement != places:
                continue
            if not isinstance(counts, tuple) or candidate.virtual_stages == wanted:
                yield candidate
                yield from with_more_stages(problem, candidate)


def with_more_stages(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """An interleaved plan with the most stages of whole layers on a rank in place of two, if the
    options leave that open, it saves a GAIN of idle time, and with two nothing must be recomputed.

    With v stages ranks idle for (p - 1) / v of a micro-batch's seconds (Narayanan et al. 2021,
    arXiv 2104.04473, section 2.2).
    """
    options = problem.options
    is_open = options.virtual_stages == 1 and plan.stages is None
    is_open = is_open and not isinstance(options.stages, tuple)
    if (plan.schedule, plan.virtual_stages) != ("interleaved", 2) or not is_open:
        return
    if options.schedule == "interleaved":  # by name it has two
        return
    ranks, layers = plan.mesh.pipeline, len(problem.priced(problem.levels[0]).cut.blocks)
    most = min(MOST_STAGES, layers // ranks)
    saved = (ranks - 1) * (1 / 2 - 1 / max(1, most))
    if saved > GAIN * plan.microbatches and not is_forced(problem, plan):
        yield dataclasses.replace(plan, virtual_stages=most)


def _with_named_schedule(plan: Plan, name: str, wanted: int) -> Plan:
    """The plan with a named schedule. Raises InputError for stages that it cannot have."""
    virtual_stages = stages_per_rank(name, wanted)
    build(name, plan.mesh.pipeline, 1, virtual_stages)  # there may be thousands of micro-batches
    return dataclasses.replace(plan, schedule=name, virtual_stages=virtual_stages)


def _with_own_schedule(plan: Plan, schedule: Schedule) -> Plan:
    """The plan with a user's own schedule."""
    virtual_stages = schedule.virtual_stages
    if schedule.name in SCHEDULES:
        with suppress(InputError):  # its orders may not be those of its name
            named = _with_named_schedule(plan, schedule.name, virtual_stages)
            if trunk(named) == schedule:
                return named
    return dataclasses.replace(
        plan, schedule=schedule.name, virtual_stages=virtual_stages, orders=schedule.cells()
    )
