"""Which block runs on which pipeline stage.

The programme is in `divide/`. Here the blocks become its data, at the coarsest granularity that
is good enough: layers first; pieces of layers only when whole layers leave the step more than
`slack` above what a perfectly even division would take, and pieces really shorten it.

Where nothing fits and the options leave recomputation to memory, the same again with everything
recomputed, and then without that on the ranks that fit without (see `recompute`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from parcompiler.errors import InfeasibleError
from parcompiler.passes import given
from parcompiler.passes.base import Pass
from parcompiler.passes.divide import Division, divide, evaluate, memory_parts
from parcompiler.passes.estimate import estimate
from parcompiler.passes.loads import data, data_under, held, needed, reserved, with_recomputed
from parcompiler.passes.recompute import chosen
from parcompiler.passes.spread import vocabulary_cost
from parcompiler.plan import Plan, Solution, StageChoice
from parcompiler.problem import Problem
from parcompiler.schedules.planned import planned
from parcompiler.solver import UndecidedError, relative_gap

NEARLY = 0.9  # of the memory; below it messages are no matter
STEP = 0.005  # of the memory that is kept free at least, when there is too little
Wanted = str | Mapping[str, bool]  # what to recompute, as in the options


@dataclass(frozen=True)
class StagePass(Pass):
    """Decides `plan.stages`, `plan.granularity`, `plan.sent` and `plan.recompute`.

    `slack` is the share of the step time that finer blocks must be able to save to be tried,
    `gain` the share that they must really save.
    """

    name: ClassVar[str] = "stage"
    slack: float = 0.05
    gain: float = 0.02

    def run(self, problem: Problem, plan: Plan) -> Plan:
        """Divide, and recompute what the user asked for or what memory forces."""
        wanted = problem.options.recompute
        if plan.stages is not None:
            return plan
        if wanted != "auto":
            return self._divided(problem, plan, wanted)
        with suppress(InfeasibleError, UndecidedError):
            return self._divided(problem, plan, "none", explain=False)
        with suppress(InfeasibleError, UndecidedError):
            return _spared(problem, self._divided(problem, plan, "full", explain=False))
        raise self._refusal(problem, plan)

    def _refusal(self, problem: Problem, plan: Plan) -> InfeasibleError:
        """What to say when nothing fits, recomputed or not."""
        found = []
        for wanted in ("none", "full"):
            try:
                self._divided(problem, plan, wanted)
            except InfeasibleError as error:
                found.append(error)
        first, last = found
        if str(first) != str(last):
            first.add_note(f"with every block recomputed, {last}")
        return first

    def _divided(
        self, problem: Problem, plan: Plan, wanted: Wanted, *, explain: bool = True
    ) -> Plan:
        """Divide as the user asked: by the ILP, evenly, or by counts."""
        stages = problem.options.stages
        if stages == "auto":
            level, division = self._automatic(problem, plan, wanted, explain=explain)
            plan = _recomputing(problem, plan, level, wanted)
        else:
            level, stage_of = given.division(problem, stages, len(planned(plan).placement))
            plan = _recomputing(problem, plan, level, wanted)
            division = _evaluated(problem, plan, level, stage_of)
        return _decided(problem, plan, level, division)

    def _automatic(
        self, problem: Problem, plan: Plan, wanted: Wanted, *, explain: bool
    ) -> tuple[int, Division]:
        """The coarsest granularity that is good enough, and its best division."""
        best: tuple[int, Division] | None = None
        refusal: InfeasibleError | None = None
        for level in problem.levels:
            priced = problem.priced(level)
            if best is not None and len(priced.cut.blocks) == len(
                problem.priced(best[0]).cut.blocks
            ):
                continue
            trial = _recomputing(problem, plan, level, wanted)
            try:
                division = _fitting(problem, trial, level, explain=explain)
            except InfeasibleError as error:
                refusal = error
                continue
            if best is None or division.objective < (1 - self.gain) * best[1].objective:
                best = level, division
            least = _fill_and_drain(problem, _recomputing(problem, plan, best[0], wanted), best[0])
            if best[1].objective <= (1 + self.slack) * least:
                break
        if best is None:
            assert refusal is not None
            raise refusal
        return best


def _recomputing(problem: Problem, plan: Plan, level: int, wanted: Wanted) -> Plan:
    """A plan for a granularity with what is wanted recomputed."""
    return dataclasses.replace(plan, recompute=chosen(problem, level, wanted))


def _fitting(problem: Problem, plan: Plan, level: int, *, explain: bool = True) -> Division:
    """The best division at a granularity whose simulated step fits into the memory.

    The programme does not know how many messages are on their way at once. A rank that it fills to
    NEARLY is simulated, and what is too much then is kept free from the beginning.
    """
    memory, free = problem.device.memory, 0
    while True:
        division = _divide(problem, plan, level, free, explain=explain)
        if max(needed(problem, plan, level, division.stage_of)) <= NEARLY * memory:
            return division
        decided = _decided(problem, plan, level, division)
        over = max(estimate(problem, decided).peak_memory) - memory
        if over <= 0:
            return division
        free += max(over, math.ceil(memory * STEP))


def _divide(
    problem: Problem, plan: Plan, level: int, free: int = 0, *, explain: bool = True
) -> Division:
    """The best division at a granularity that leaves some bytes of every rank free."""
    schedule = planned(plan)
    limit = problem.device.memory - reserved(problem, plan, level) - free
    try:
        return divide(
            *data_under(problem, plan, level),
            schedule.placement,
            plan.microbatches,
            held(schedule),
            [float(max(1, limit))] * schedule.ranks,
            names=[block.name for block in problem.priced(level).cut.blocks],
            explain=explain,
        )
    except InfeasibleError as error:
        if limit < problem.device.memory:
            kept = problem.device.memory - limit
            error.add_note(f"{kept:,} bytes more are kept free for messages and recomputation")
        raise


def _evaluated(problem: Problem, plan: Plan, level: int, stage_of: Sequence[int]) -> Division:
    """A division that the user gave, with its predicted step time. Its memory must fit."""
    schedule = planned(plan)
    loads, flows = data_under(problem, plan, level)
    kept, placement = held(schedule), schedule.placement
    found = evaluate(loads, flows, stage_of, placement, plan.microbatches, kept)
    memory = with_recomputed(problem, plan, level, stage_of, found.memory)
    worst = max(range(len(memory)), key=memory.__getitem__)
    if memory[worst] > problem.device.memory:
        names = [block.name for block in problem.priced(level).cut.blocks]
        parts = memory_parts(loads, flows, stage_of, placement, kept, worst, names)
        largest = max(parts, key=lambda part: part.size)
        message = (
            f"rank {worst} of this division needs {memory[worst]:,} bytes, "
            f"{problem.device.name} has {problem.device.memory:,}; the largest part is "
            f'{largest.what} ({largest.size:,} bytes). stages="auto" may find one that fits'
        )
        raise InfeasibleError(message)
    return Division(tuple(stage_of), "given", found.objective, 0.0, 1.0)


def reconsidered(problem: Problem, plan: Plan) -> Plan:
    """A finished plan, with what a solver said of it dropped when it was edited since.

    Raises InfeasibleError when a rank does not fit into the memory.
    """
    division = _reevaluated(problem, plan)
    if plan.solution is not None and plan.solution.objective == division.objective:
        return plan
    return dataclasses.replace(plan, solution=_solution(division))


def _reevaluated(problem: Problem, plan: Plan) -> Division:
    """The division of a finished plan, as one that was given."""
    assert plan.granularity is not None
    assert plan.stages is not None
    home = {name: j for j, choice in enumerate(plan.stages) for name in choice.blocks}
    blocks = problem.priced(plan.granularity).cut.blocks
    stage_of = tuple(home[block.name] for block in blocks)
    return _evaluated(problem, plan, plan.granularity, stage_of)


def _spared(problem: Problem, plan: Plan) -> Plan:
    """A finished plan without recomputation on the ranks that fit without."""
    assert plan.granularity is not None
    assert plan.stages is not None
    best = plan
    for rank in range(plan.mesh.pipeline):
        own = {name for c in plan.stages if c.rank == rank for name in c.blocks}
        trial = tuple(name for name in best.recompute or () if name not in own)
        with suppress(InfeasibleError):
            found = dataclasses.replace(best, recompute=trial)
            division = _reevaluated(problem, found)
            bare = dataclasses.replace(plan, recompute=())
            bound = _fill_and_drain(problem, bare, plan.granularity)
            gap = relative_gap(division.objective, bound)
            solution = Solution("feasible", division.objective, bound, gap)
            best = dataclasses.replace(found, solution=solution)
    return best


def _solution(division: Division) -> Solution:
    """What is known of a division."""
    return Solution(division.status, division.objective, division.bound, division.gap)


def _decided(problem: Problem, plan: Plan, level: int, division: Division) -> Plan:
    """The plan with the division in it."""
    priced = problem.priced(level)
    names: list[list[str]] = [[] for _ in planned(plan).placement]
    for block, at in zip(priced.cut.blocks, division.stage_of, strict=True):
        names[at].append(block.name)
    stages = tuple(
        StageChoice(tuple(held), rank)
        for held, rank in zip(names, planned(plan).placement, strict=True)
    )
    return dataclasses.replace(
        plan,
        granularity=level,
        sent=tuple(node.name for node in priced.sent),
        stages=stages,
        solution=_solution(division),
    )


def _fill_and_drain(problem: Problem, plan: Plan, level: int) -> float:
    """The step time of a perfectly even division without messages."""
    stages, ranks = len(planned(plan).placement), plan.mesh.pipeline
    total = sum(load.seconds for load in data(problem, level, recompute=plan.recompute or ())[0])
    return total * ranks / stages + (plan.microbatches - 1) * total / ranks


def ideal(problem: Problem, plan: Plan) -> float:
    """The step time of even ranks that are never idle: no schedule is faster.

    What memory forces one schedule to recompute another may keep.
    """
    assert plan.granularity is not None
    forced = problem.options.recompute == "auto"
    priced = problem.priced(plan.granularity) if forced else problem.under(plan)
    spread = vocabulary_cost(problem, plan)
    everywhere = spread.compute if spread else 0.0
    blocks = sum((*priced.forward, *priced.backward)) / plan.mesh.pipeline
    return plan.microbatches * (blocks + everywhere)
