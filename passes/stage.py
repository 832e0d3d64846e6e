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
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar

from parcompiler.capture.blocks import why_so_few
from parcompiler.errors import InfeasibleError, InputError, PlanError
from parcompiler.passes import given
from parcompiler.passes.base import Pass
from parcompiler.passes.divide import StageDivision, divide, evaluate, memory_parts, spared
from parcompiler.passes.divide.runs import even_runs, lean_runs
from parcompiler.passes.estimate import alone, estimate, least_update
from parcompiler.passes.even import TINY, as_asked
from parcompiler.passes.forced import division_task, names_of
from parcompiler.passes.loads import data, data_under, reserved
from parcompiler.passes.recompute import chosen
from parcompiler.passes.spread import vocabulary_cost
from parcompiler.plan import Plan, Solution, StageChoice
from parcompiler.problem import Problem
from parcompiler.schedules.planned import held, outline
from parcompiler.solver import UndecidedError, relative_gap

EFFORT = 100_000  # of improving a division: stages times micro-batches and blocks, for each step
MAYBE = '. stages="auto" may find one that fits'
SPARED = " (and keeps a fiftieth free, as parameters are gathered)"
FAR = 0.1  # of the memory that would do: what a programme may count too much when it refuses
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
        return self._all_or_nothing(problem, plan)

    def _all_or_nothing(self, problem: Problem, plan: Plan) -> Plan:
        """A division with nothing or with everything recomputed. Raises InfeasibleError that says
        of both why they do not fit."""
        refusals = []
        for wanted in ("none", "full"):
            try:
                return self._divided(problem, plan, wanted)
            except InfeasibleError as error:
                refusals.append(error)
            except UndecidedError as undecided:
                refusals.append(InfeasibleError(f"no division was found that fits ({undecided})"))
        first, last = refusals
        if str(first) != str(last):
            first.add_note(f"with every block recomputed, {last}")
        raise first

    def _divided(
        self, problem: Problem, plan: Plan, wanted: Wanted, *, explain: bool = True
    ) -> Plan:
        """Divide as the user asked: automatically, evenly, or by counts."""
        stages = problem.options.stages
        if stages == "auto":
            return self._automatic(problem, plan, wanted, explain=explain)
        level, stage_of = given.division(problem, stages, len(outline(plan).placement))
        division, plan = _given(problem, plan, level, stage_of, wanted)
        return _decided(problem, plan, level, division)

    def _automatic(self, problem: Problem, plan: Plan, wanted: Wanted, *, explain: bool) -> Plan:
        """The division with the shortest step on the timeline: the programme's, the runs that it
        began with, even stages, or one that moving blocks makes of the best of these."""
        shortest = _Shortest(problem, plan, wanted)
        level: int | None = None
        others: tuple[tuple[int, ...], ...] = ()
        refusal: InfeasibleError | UndecidedError | None = None
        try:
            level, division, trial = self._programmed(problem, plan, wanted, explain=explain)
        except (InfeasibleError, UndecidedError) as error:
            refusal = error
        else:
            others, shortest.bounds[level] = division.others, division.bound
            decided = _decided(problem, trial, level, division)
            try:
                shortest.take(decided, level, division.stage_of)
            except PlanError:  # an order that never ends: the verifier says why
                return decided
        for alternative in _alternatives(problem, plan, level, others):
            shortest.consider(*alternative)
        if shortest.plan is None:
            assert refusal is not None
            needed, lean = getattr(refusal, "needed", None) or 0, shortest.leanest
            if lean is not None and (lean.needed or needed) < (1 - FAR) * needed:
                lean.add_note("of the divisions that were tried, that needs least")
                raise lean from refusal  # the programme counts more than the timeline
            raise refusal
        shortest.improve()
        return shortest.plan

    def _programmed(
        self, problem: Problem, plan: Plan, wanted: Wanted, *, explain: bool
    ) -> tuple[int, StageDivision, Plan]:
        """The coarsest granularity that is good enough, the programme's division, and a plan with
        what is recomputed then."""
        best: tuple[int, StageDivision, Plan] | None = None
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
            stages = len(outline(plan).placement)
            if stages > len(problem.priced(problem.levels[-1]).cut.blocks):
                refusal.add_note(why_so_few(problem.graph))
            raise refusal
        return best


def _alternatives(
    problem: Problem, plan: Plan, level: int | None, others: Sequence[tuple[int, ...]]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Granularities and stages to compare with the programme's at `level`: what it began with, and
    stages that are even in layers or in blocks; where it failed, also in seconds and in bytes."""
    stages = len(outline(plan).placement)
    if level is not None:
        yield from ((level, stage_of) for stage_of in others)
    with suppress(InputError):  # too few layers
        yield given.division(problem, "even", stages)
    sizes = {k: len(problem.priced(k).cut.blocks) for k in problem.levels}
    coarsest = next((k for k, blocks in sizes.items() if blocks >= stages), None)
    if coarsest is None:
        return
    each, rest = divmod(sizes[coarsest], stages)
    for more in (range(rest), range(stages - rest, stages)):  # the rest first or last
        counts = (each + (j in more) for j in range(stages))
        yield coarsest, tuple(j for j, count in enumerate(counts) for _ in range(count))
    if level is None:
        task = division_task(problem, as_asked(problem, plan, coarsest), coarsest)
        yield from ((coarsest, start(task)) for start in (even_runs, lean_runs))


@dataclass
class _Shortest:
    """The division whose step is the shortest on the timeline, of those considered so far; of equal
    ones the first."""

    problem: Problem
    start: Plan
    wanted: Wanted
    plan: Plan | None = None
    seconds: float = math.inf
    level: int = 0
    stage_of: tuple[int, ...] = ()
    bounds: dict[int, float] = field(default_factory=dict)  # of the formula, by granularity
    considered: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)
    leanest: InfeasibleError | None = None  # of those that do not fit

    def take(self, plan: Plan, level: int, stage_of: tuple[int, ...]) -> bool:
        """Take a plan that fits if its step is shorter."""
        seconds = estimate(self.problem, plan).step_time
        if seconds >= (1 - TINY) * self.seconds:
            return False
        self.plan, self.seconds, self.level, self.stage_of = plan, seconds, level, stage_of
        return True

    def consider(self, level: int, stage_of: tuple[int, ...]) -> bool:
        """Take stages if they fit and their step is shorter."""
        least = _least_step(self.problem, self.start, level, stage_of)
        if least >= (1 - TINY) * self.seconds or (level, stage_of) in self.considered:
            return False
        self.considered.add((level, stage_of))
        bare = _recomputing(self.problem, self.start, level, "none")
        if self.wanted in ("none", "auto"):
            bare = placed(self.problem, bare, level, stage_of)
            if alone(self.problem, bare) >= (1 - TINY) * self.seconds:
                return False
        try:
            division, trial = _given(self.problem, self.start, level, stage_of, self.wanted)
        except UndecidedError:
            return False
        except InfeasibleError as error:
            if error.needed and (not self.leanest or error.needed < (self.leanest.needed or 0)):
                self.leanest = error
            return False
        if level not in self.bounds:
            self.bounds[level] = _fill_and_drain(self.problem, self.start, level)
        division = _behind(division, self.bounds[level])
        return self.take(_decided(self.problem, trial, level, division), level, stage_of)

    def improve(self) -> None:
        """Move one block, or two, to the stages beside theirs as long as that shortens the step: a
        descent, in which as many steps are simulated as their size allows. Two where values skip
        blocks: elsewhere the second gained nothing.

        With one stage on each rank and values for the next block alone, the programme's formula
        says nearly what the timeline says, and its optimum is kept. So are the stages beside a
        vocabulary on all ranks, whose steps take ten times as long to simulate.
        """
        ranks, stages = self.start.mesh.pipeline, len(outline(self.start).placement)
        flows = data(self.problem, self.level)[1]
        is_chain = all(flow.consumers == (flow.producer + 1,) for flow in flows)
        if (is_chain and stages == ranks) or vocabulary_cost(self.problem, self.start) is not None:
            return
        each = stages * (self.start.microbatches + len(self.stage_of))
        most = len(self.considered) + EFFORT // each
        moves = _moves(self.stage_of, twice=not is_chain)
        while len(self.considered) < most and (stage_of := next(moves, None)) is not None:
            if self.consider(self.level, stage_of):
                moves = _moves(self.stage_of, twice=not is_chain)


def _moves(stage_of: tuple[int, ...], *, twice: bool) -> Iterator[tuple[int, ...]]:
    """The stages after one move of a block, and where asked for after two."""
    yield from _moved(stage_of)
    if twice:
        yield from chain.from_iterable(map(_moved, _moved(stage_of)))


def _moved(stage_of: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The last block of a stage on the stage behind it, or the first on the one before: no value
    goes backwards then."""
    for j in range(max(stage_of)):
        for here, there in ((j, j + 1), (j + 1, j)):
            blocks = [i for i, at in enumerate(stage_of) if at == here]
            if len(blocks) > 1:
                i = blocks[-1] if there > here else blocks[0]
                yield (*stage_of[:i], there, *stage_of[i + 1 :])


def _least_step(problem: Problem, plan: Plan, level: int, stage_of: Sequence[int]) -> float:
    """A lower bound of a division's step, whatever is recomputed: the slowest rank, never idle."""
    placement, busy = outline(plan).placement, [0.0] * plan.mesh.pipeline
    for load, j in zip(data(problem, level)[0], stage_of, strict=True):
        busy[placement[j]] += load.on(placement[j])
    return plan.microbatches * max(busy) + least_update(problem)


def _behind(division: StageDivision, bound: float) -> StageDivision:
    """A division of which it is known that the programme's formula is not below `bound`."""
    gap = relative_gap(division.objective, bound)
    return dataclasses.replace(division, status="feasible", bound=bound, gap=gap)


def _recomputing(problem: Problem, plan: Plan, level: int, wanted: Wanted) -> Plan:
    """A plan for a granularity with what is wanted recomputed."""
    return dataclasses.replace(plan, recompute=chosen(problem, level, wanted))


def _fitting(
    problem: Problem, plan: Plan, level: int, wanted: Wanted, *, explain: bool = True
) -> tuple[StageDivision, Plan]:
    """The best division at a granularity whose simulated step fits into the memory, and a plan with
    what is recomputed in it.

    The programme does not know how many messages are on their way at once. What is too much in the
    simulated step is kept free from the beginning of the next try.
    """
    free = [0] * len(problem.memories)
    while True:
        division, trial = _divide(problem, plan, level, wanted, free, explain=explain)
        over = _over(problem, _decided(problem, trial, level, division))
        if max(over) <= 0:
            return division, trial
        free = list(_freer(problem, free, over))


def _over(problem: Problem, plan: Plan) -> list[int]:
    """Bytes by which the step of a divided plan exceeds the memory of each rank; none where an
    order never ends."""
    try:
        peaks = estimate(problem, plan).peak_memory
    except PlanError:  # the verifier says why
        return [0] * len(problem.memories)
    return [peak - memory for peak, memory in zip(peaks, problem.memories, strict=True)]


def _freer(problem: Problem, free: Sequence[int], over: Sequence[int]) -> Iterator[int]:
    """The bytes to keep free on each rank after a try that was over its memory by so many; as many
    on all ranks with the same device."""
    devices = problem.devices
    for kept, device in zip(free, devices, strict=True):
        most = max(size for size, other in zip(over, devices, strict=True) if other == device)
        yield kept + max(most, math.ceil(problem.room(device) * STEP)) if most > 0 else kept


def _divide(
    problem: Problem, plan: Plan, level: int, wanted: Wanted, free: Sequence[int], *, explain: bool
) -> tuple[StageDivision, Plan]:
    """The best division at a granularity that leaves some bytes of each rank free, and a plan with
    what is recomputed in it."""
    memories = problem.memories
    besides = [reserved(problem, plan) + kept for kept in free]
    limits = [memory - kept for memory, kept in zip(memories, besides, strict=True)]
    is_free = wanted == "auto"
    if not is_free:
        plan = _recomputing(problem, plan, level, wanted)
    blocks = problem.priced(level).cut.blocks
    try:
        division = divide(
            division_task(problem, plan, level, limits, is_free=is_free),
            names=[block.name for block in blocks],
            explain=explain,
            besides=besides,
            memory=memories,
        )
    except InfeasibleError as error:
        most = max(besides)
        if most and len(outline(plan).placement) <= len(blocks):
            kept = f"{most:,} bytes" if most == min(besides) else f"up to {most:,} bytes"
            error.add_note(f"{kept} of it are kept free for messages, batch and vocabulary")
        raise
    if is_free:
        plan = dataclasses.replace(plan, recompute=names_of(problem, level, division.twice))
    return division, plan


def _given(
    problem: Problem, plan: Plan, level: int, stage_of: Sequence[int], wanted: Wanted
) -> tuple[StageDivision, Plan]:
    """Stages that are not the programme's, and a plan with what is recomputed in them. Raises
    InfeasibleError where the step does not fit into the memory."""
    first = _recomputing(problem, plan, level, "none" if wanted == "auto" else wanted)
    try:
        return _evaluated(problem, first, level, stage_of), first
    except InfeasibleError:
        if wanted != "auto":
            raise
        return _forced(problem, first, level, stage_of)


def _forced(
    problem: Problem, plan: Plan, level: int, stage_of: Sequence[int]
) -> tuple[StageDivision, Plan]:
    """Stages that fit only if something is recomputed."""
    memories = problem.memories
    free = [reserved(problem, plan)] * len(memories)
    while True:
        limits = [memory - kept for memory, kept in zip(memories, free, strict=True)]
        twice = spared(division_task(problem, plan, level, limits, is_free=True), stage_of)
        if twice is None:  # by the programme's bytes, which may be too many
            trial = _recomputing(problem, plan, level, "full")
            return _evaluated(problem, trial, level, stage_of), trial
        trial = dataclasses.replace(plan, recompute=names_of(problem, level, twice))
        division = _priced(problem, trial, level, stage_of)
        over = _over(problem, _decided(problem, trial, level, division))
        if max(over) <= 0:
            return _behind(division, _fill_and_drain(problem, plan, level)), trial
        free = list(_freer(problem, free, over))


def _priced(problem: Problem, plan: Plan, level: int, stage_of: Sequence[int]) -> StageDivision:
    """Stages that are not the programme's, with the seconds that its formula predicts."""
    data, order = data_under(problem, plan, level), outline(plan)
    found = evaluate(*data, stage_of, order.placement, plan.microbatches, held(plan))
    return StageDivision(tuple(stage_of), "given", found.objective, 0.0, 1.0)


def _evaluated(problem: Problem, plan: Plan, level: int, stage_of: Sequence[int]) -> StageDivision:
    """Stages that are not the programme's. Raises InfeasibleError where the step does not fit."""
    division = _priced(problem, plan, level, stage_of)
    memory = estimate(problem, _decided(problem, plan, level, division)).peak_memory
    worst = max(range(len(memory)), key=lambda r: memory[r] / problem.memories[r])
    device, room = problem.devices[worst], problem.memories[worst]
    if memory[worst] > room:
        loads, flows = data_under(problem, plan, level)
        names = [block.name for block in problem.priced(level).cut.blocks]
        placement = outline(plan).placement
        parts = memory_parts(loads, flows, stage_of, placement, held(plan), worst, names)
        largest = max(parts, key=lambda part: part.size)
        error = InfeasibleError(
            f"rank {worst} of this division needs {memory[worst]:,} bytes, "
            f"{device.name} has {room:,}{SPARED if problem.gathers else ''}, "
            f"{memory[worst] - room:,} less; the largest part is "
            f"{largest.what} ({largest.size:,} bytes)"
            f"{'' if problem.options.stages == 'auto' else MAYBE}"
        )
        error.needed = memory[worst]
        raise error
    return division


def reconsidered(problem: Problem, plan: Plan) -> Plan:
    """A finished plan, with what a solver said of it dropped when it was edited since.

    Raises InfeasibleError when a rank does not fit into the memory.
    """
    try:
        division = _reevaluated(problem, plan)
    except InfeasibleError:
        raise
    except PlanError:  # an order that never ends: the verifier says why
        return plan
    if plan.solution is not None and plan.solution.objective == division.objective:
        return plan
    return dataclasses.replace(plan, solution=_solution(division))


def _reevaluated(problem: Problem, plan: Plan) -> StageDivision:
    """The division of a finished plan, as one that was given."""
    assert plan.granularity is not None
    assert plan.stages is not None
    home = {name: j for j, choice in enumerate(plan.stages) for name in choice.blocks}
    blocks = problem.priced(plan.granularity).cut.blocks
    stage_of = tuple(home[block.name] for block in blocks)
    return _evaluated(problem, plan, plan.granularity, stage_of)


def _solution(division: StageDivision) -> Solution:
    """What is known of a division."""
    return Solution(division.status, division.objective, division.bound, division.gap)


def _decided(problem: Problem, plan: Plan, level: int, division: StageDivision) -> Plan:
    """The plan with the division in it."""
    found = placed(problem, plan, level, division.stage_of)
    return dataclasses.replace(found, solution=_solution(division))


def placed(problem: Problem, plan: Plan, level: int, stage_of: Sequence[int]) -> Plan:
    """The plan with the blocks at a granularity on these stages."""
    priced = problem.priced(level)
    names: list[list[str]] = [[] for _ in outline(plan).placement]
    for block, at in zip(priced.cut.blocks, stage_of, strict=True):
        names[at].append(block.name)
    stages = tuple(
        StageChoice(tuple(held), rank)
        for held, rank in zip(names, outline(plan).placement, strict=True)
    )
    sent = tuple(node.name for node in priced.sent)
    return dataclasses.replace(plan, granularity=level, sent=sent, stages=stages)


def _fill_and_drain(problem: Problem, plan: Plan, level: int) -> float:
    """The step time of a perfectly even division without messages."""
    stages, ranks = len(outline(plan).placement), plan.mesh.pipeline
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
