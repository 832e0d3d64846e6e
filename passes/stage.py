"""Which block runs on which pipeline stage.

The programme is in `divide/`. Here the blocks become its data, at the coarsest granularity that
is good enough: layers first; pieces of layers only when whole layers leave the step more than
`slack` above what a perfectly even division would take, and pieces really shorten it.

Where the options leave recomputation to memory, the programme chooses it together with the stages
(see `forced`): nothing is recomputed unless more memory would make the step shorter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from parcompiler.capture.blocks import why_so_few
from parcompiler.errors import InfeasibleError
from parcompiler.passes import given
from parcompiler.passes.base import Pass
from parcompiler.passes.divide import Division, divide, evaluate, memory_parts
from parcompiler.passes.estimate import estimate
from parcompiler.passes.forced import jointly, spared
from parcompiler.passes.loads import data, data_under, needed, reserved
from parcompiler.passes.recompute import chosen
from parcompiler.passes.spread import vocabulary_cost
from parcompiler.plan import Plan, Solution, StageChoice
from parcompiler.problem import Problem
from parcompiler.schedules.planned import held, planned
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
    slack: float = 0.1
    gain: float = 0.1

    def run(self, problem: Problem, plan: Plan) -> Plan:
        """Divide, and recompute what the user asked for or what memory forces.

        A division is remembered: who weighs schedules asks for it first.
        """
        if plan.stages is not None:
            return plan
        order = plan.schedule, plan.orders, plan.virtual_stages, plan.microbatches
        asked = repr(problem.options.stages), repr(problem.options.recompute), plan.recompute
        key = self, *order, *asked, plan.vocabulary and plan.vocabulary.method
        found = problem.once(key, lambda: self._found(problem, plan))
        names = "granularity", "sent", "stages", "recompute", "solution"
        return dataclasses.replace(plan, **{name: getattr(found, name) for name in names})

    def _found(self, problem: Problem, plan: Plan) -> Plan:
        """The same, for the first time."""
        wanted = problem.options.recompute
        if wanted != "auto":
            return self._divided(problem, plan, wanted, explain=problem.explain)
        with suppress(InfeasibleError, UndecidedError):
            return self._divided(problem, plan, wanted, explain=False)
        if not problem.explain:
            message = "no division into stages fits the memory, every block recomputed or not"
            raise InfeasibleError(message)
        raise self._refusal(problem, plan)

    def _refusal(self, problem: Problem, plan: Plan) -> InfeasibleError:
        """What to say when nothing fits, recomputed or not."""
        found = []
        for wanted in ("none", "full"):
            try:
                found.append(_crowded(problem, self._divided(problem, plan, wanted)))
            except InfeasibleError as error:
                found.append(error)
            except UndecidedError as undecided:
                found.append(InfeasibleError(f"no division was found that fits ({undecided})"))
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
            level, division, plan = self._automatic(problem, plan, wanted, explain=explain)
        else:
            level, stage_of = given.division(problem, stages, len(planned(plan).placement))
            division, plan = _given(problem, plan, level, stage_of, wanted)
        return _decided(problem, plan, level, division)

    def _automatic(
        self, problem: Problem, plan: Plan, wanted: Wanted, *, explain: bool
    ) -> tuple[int, Division, Plan]:
        """The coarsest granularity that is good enough, its best division, and a plan with what is
        recomputed then."""
        best: tuple[int, Division, Plan] | None = None
        refusal: InfeasibleError | None = None
        for level in problem.levels:
            priced = problem.priced(level)
            if best is not None and len(priced.cut.blocks) == len(
                problem.priced(best[0]).cut.blocks
            ):
                continue
            try:
                division, trial = _fitting(problem, plan, level, wanted, explain=explain)
            except InfeasibleError as error:
                refusal = error
                continue
            if best is None or division.objective < (1 - self.gain) * best[1].objective:
                best = level, division, trial
            least = _fill_and_drain(problem, best[2], best[0])
            if best[1].objective <= (1 + self.slack) * least:
                break
        if best is None:
            assert refusal is not None
            stages = len(planned(plan).placement)
            if stages > len(problem.priced(problem.levels[-1]).cut.blocks):
                refusal.add_note(why_so_few(problem.graph))
            raise refusal
        return best


def _crowded(problem: Problem, plan: Plan) -> InfeasibleError:
    """What to say of a plan that fits but for the messages on their way."""
    sizes = estimate(problem, plan).peak_memory
    devices = problem.devices
    rank = max(range(len(sizes)), key=lambda r: sizes[r] / devices[r].memory)
    message = (
        f"rank {rank} needs {sizes[rank]:,} bytes with the messages on their way, "
        f"{devices[rank].name} has {devices[rank].memory:,}: use more ranks or smaller "
        "micro-batches"
    )
    return InfeasibleError(message)


def _recomputing(problem: Problem, plan: Plan, level: int, wanted: Wanted) -> Plan:
    """A plan for a granularity with what is wanted recomputed."""
    return dataclasses.replace(plan, recompute=chosen(problem, level, wanted))


def _fitting(
    problem: Problem, plan: Plan, level: int, wanted: Wanted, *, explain: bool = True
) -> tuple[Division, Plan]:
    """The best division at a granularity whose simulated step fits into the memory, and a plan with
    what is recomputed in it.

    The programme does not know how many messages are on their way at once. A rank that it fills to
    NEARLY is simulated, and what is too much then is kept free from the beginning.
    """
    free = [0] * len(problem.memories)
    while True:
        division, trial = _divide(problem, plan, level, wanted, free, explain=explain)
        over = _over(problem, trial, level, division)
        if max(over) <= 0:
            return division, trial
        free = list(_freer(problem, free, over))


def _over(problem: Problem, plan: Plan, level: int, division: Division) -> list[int]:
    """Bytes by which the simulated step of a division exceeds the memory of each rank, where it
    may."""
    memories = problem.memories
    sizes = needed(problem, plan, level, division.stage_of)
    if all(size <= NEARLY * memory for size, memory in zip(sizes, memories, strict=True)):
        return [0] * len(memories)
    peaks = estimate(problem, _decided(problem, plan, level, division)).peak_memory
    return [peak - memory for peak, memory in zip(peaks, memories, strict=True)]


def _freer(problem: Problem, free: Sequence[int], over: Sequence[int]) -> Iterator[int]:
    """The bytes to keep free on each rank after a try that was over its memory by so many; as many
    on all ranks with the same device."""
    devices = problem.devices
    for kept, device in zip(free, devices, strict=True):
        most = max(size for size, other in zip(over, devices, strict=True) if other == device)
        yield kept + max(most, math.ceil(device.memory * STEP)) if most > 0 else kept


def _divide(
    problem: Problem, plan: Plan, level: int, wanted: Wanted, free: Sequence[int], *, explain: bool
) -> tuple[Division, Plan]:
    """The best division at a granularity that leaves some bytes of each rank free, and a plan with
    what is recomputed in it."""
    schedule, memories = planned(plan), problem.memories
    besides = [reserved(problem, plan) + kept for kept in free]
    limits = [memory - kept for memory, kept in zip(memories, besides, strict=True)]
    if wanted == "auto":
        division, names = jointly(problem, plan, level, limits)
        return division, dataclasses.replace(plan, recompute=names)
    plan = _recomputing(problem, plan, level, wanted)
    try:
        division = divide(
            *data_under(problem, plan, level),
            schedule.placement,
            plan.microbatches,
            held(plan),
            [float(max(1, limit)) for limit in limits],
            names=[block.name for block in problem.priced(level).cut.blocks],
            explain=explain,
            besides=besides,
            memory=memories,
        )
    except InfeasibleError as error:
        most = max(besides)
        if most and len(schedule.placement) <= len(problem.priced(level).cut.blocks):
            kept = f"{most:,} bytes" if most == min(besides) else f"up to {most:,} bytes"
            error.add_note(f"{kept} of it are kept free for messages, batch and vocabulary")
        raise
    return division, plan


def _given(
    problem: Problem, plan: Plan, level: int, stage_of: Sequence[int], wanted: Wanted
) -> tuple[Division, Plan]:
    """A division that the user gave, and a plan with what is recomputed in it."""
    first = _recomputing(problem, plan, level, "none" if wanted == "auto" else wanted)
    try:
        return _evaluated(problem, first, level, stage_of), first
    except InfeasibleError:
        if wanted != "auto":
            raise
        return _forced(problem, first, level, stage_of)


def _forced(
    problem: Problem, plan: Plan, level: int, stage_of: Sequence[int]
) -> tuple[Division, Plan]:
    """A division that the user gave and that fits only if something is recomputed."""
    memories = problem.memories
    free = [reserved(problem, plan)] * len(memories)
    while True:
        limits = [memory - kept for memory, kept in zip(memories, free, strict=True)]
        names = spared(problem, plan, level, stage_of, limits)
        if names is None:
            message = "these stages do not fit, whatever is recomputed"
            raise InfeasibleError(message)
        trial = dataclasses.replace(plan, recompute=names)
        found = _evaluated(problem, trial, level, stage_of)
        over = _over(problem, trial, level, found)
        if max(over) <= 0:
            bound = _fill_and_drain(problem, plan, level)
            gap = relative_gap(found.objective, bound)
            return dataclasses.replace(found, status="feasible", bound=bound, gap=gap), trial
        free = list(_freer(problem, free, over))


def _evaluated(problem: Problem, plan: Plan, level: int, stage_of: Sequence[int]) -> Division:
    """A division that the user gave, with its predicted step time. Its memory must fit."""
    schedule = planned(plan)
    loads, flows = data_under(problem, plan, level)
    kept, placement = held(plan), schedule.placement
    found = evaluate(loads, flows, stage_of, placement, plan.microbatches, kept)
    memory, devices = [size + reserved(problem, plan) for size in found.memory], problem.devices
    worst = max(range(len(memory)), key=lambda r: memory[r] / devices[r].memory)
    if memory[worst] > devices[worst].memory:
        names = [block.name for block in problem.priced(level).cut.blocks]
        parts = memory_parts(loads, flows, stage_of, placement, kept, worst, names)
        largest = max(parts, key=lambda part: part.size)
        message = (
            f"rank {worst} of this division needs {memory[worst]:,} bytes, "
            f"{devices[worst].name} has {devices[worst].memory:,}, "
            f"{memory[worst] - devices[worst].memory:,} less; the largest part is "
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


def _solution(division: Division) -> Solution:
    """What is known of a division."""
    return Solution(division.status, division.objective, division.bound, division.gap)


def _decided(problem: Problem, plan: Plan, level: int, division: Division) -> Plan:
    """The plan with the division in it."""
    found = placed(problem, plan, level, division.stage_of)
    return dataclasses.replace(found, solution=_solution(division))


def placed(problem: Problem, plan: Plan, level: int, stage_of: Sequence[int]) -> Plan:
    """The plan with the blocks at a granularity on these stages."""
    priced = problem.priced(level)
    names: list[list[str]] = [[] for _ in planned(plan).placement]
    for block, at in zip(priced.cut.blocks, stage_of, strict=True):
        names[at].append(block.name)
    stages = tuple(
        StageChoice(tuple(held), rank)
        for held, rank in zip(names, planned(plan).placement, strict=True)
    )
    sent = tuple(node.name for node in priced.sent)
    return dataclasses.replace(plan, granularity=level, sent=sent, stages=stages)


def _fill_and_drain(problem: Problem, plan: Plan, level: int) -> float:
    """The step time of a perfectly even division without messages."""
    stages, ranks = len(planned(plan).placement), plan.mesh.pipeline
    recompute = plan.recompute or ()
    total = sum(load.seconds for load in data(problem, level, recompute=recompute)[0])
    pace = problem.recomputing(level, recompute).pace or ranks
    return total * ranks / stages + (plan.microbatches - 1) * total / pace


def ideal(problem: Problem, plan: Plan) -> float:
    """The step time of even ranks that are never idle: no schedule is faster.

    What memory forces one schedule to recompute another may keep.
    """
    assert plan.granularity is not None
    forced = problem.options.recompute == "auto"
    priced = problem.priced(plan.granularity) if forced else problem.under(plan)
    spread = vocabulary_cost(problem, plan)
    everywhere = spread.compute if spread else 0.0
    blocks = sum((*priced.forward, *priced.backward)) / (priced.pace or plan.mesh.pipeline)
    return plan.microbatches * (blocks + everywhere)
