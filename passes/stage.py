"""Divide the blocks into pipeline stages.

Candidates are proposed by a solver (`divide/`), which minimises a formula of the step, by even
stages, by greedy runs, and by moving single blocks; the timeline judges all of them. The solver
cuts at the coarsest granularity that is good enough: whole layers first, parts of layers only when
whole layers leave the step more than `slack` above a perfectly even division, and parts really
shorten it.

Where `recompute="auto"`, it is chosen together with the stages (see `forced`): blocks are
recomputed only where memory forces it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar, NamedTuple

from parcompiler.capture.blocks import why_so_few
from parcompiler.errors import InfeasibleError, InputError, PlanError
from parcompiler.passes import given
from parcompiler.passes.base import MARGIN, Pass
from parcompiler.passes.divide import (
    StageDivision,
    check_count,
    divide,
    evaluate,
    memory_parts,
    spared,
)
from parcompiler.passes.divide.pairs import paired_runs
from parcompiler.passes.divide.runs import even_runs, lean_runs
from parcompiler.passes.estimate import alone, estimate, least_update
from parcompiler.passes.even import as_asked
from parcompiler.passes.exchange import step_of
from parcompiler.passes.forced import division_task, names_of
from parcompiler.passes.loads import data, data_under, reserved
from parcompiler.passes.recompute import chosen
from parcompiler.passes.spread import vocabulary_cost
from parcompiler.plan import Plan, Solution, StageChoice
from parcompiler.problem import Problem
from parcompiler.schedules.planned import held, outline
from parcompiler.solver import ROUNDING, UndecidedError, relative_gap

EFFORT = 100_000  # of `improve`: stages x (micro-batches + blocks), summed over simulated steps
MAYBE = '. stages="auto" may find one that fits'
FAR = 0.1  # share by which the solver may overstate the least memory when it refuses
STEP = 0.005  # least growth of the reserve when a step does not fit, as a share of the memory
Wanted = str | Mapping[str, bool]  # what to recompute, as in the options


@dataclass(frozen=True)
class StagePass(Pass):
    """Decides `plan.stages`, `plan.granularity`, `plan.sent` and `plan.recompute`.

    `slack` is the share of the step time that finer blocks must be able to save to be tried, by the
    formula or by the timeline, `gain` the share that they must really save. A step of `below`
    seconds is known: slower ones are of no use.
    """

    name: ClassVar[str] = "stage"
    slack: float = MARGIN
    gain: float = MARGIN
    below: float = math.inf

    def run(self, problem: Problem, plan: Plan) -> Plan:
        """Divide into stages, and recompute what the user asked for or what memory forces.

        Cached, because the schedule pass asks for the same divisions. Raises InfeasibleError where
        none fits, or no division is shorter than the known step.
        """
        if plan.stages is not None:
            return plan
        divided = self._known(problem, plan).plan
        names = "granularity", "sent", "stages", "recompute", "solution"
        return dataclasses.replace(plan, **{name: getattr(divided, name) for name in names})

    def is_tight(self, problem: Problem, plan: Plan, seconds: float) -> bool:
        """Whether memory forces the plan of `run` to recompute blocks, or excludes a division that
        takes less than `seconds` seconds."""
        divided = self._known(problem, plan)
        return bool(divided.plan.recompute) or divided.missed < seconds

    def _known(self, problem: Problem, plan: Plan) -> Divided:
        """`_computed`, cached."""
        order = plan.schedule, plan.orders, plan.virtual_stages, plan.microbatches
        asked = repr(problem.options.stages), repr(problem.options.recompute), plan.recompute
        known = dataclasses.replace(self, below=math.inf)  # the result serves any `below`
        key = known, *order, *asked, plan.vocabulary and plan.vocabulary.method
        lean = problem.at_zero("auto")  # with the most memory, and no gathers between passes
        least: dict[object, float] = lean.once("least steps", dict)
        if self.below <= least.get(key, 0.0):
            raise InfeasibleError(_too_long(self.below))
        try:
            return problem.once(key, lambda: self._computed(problem, plan))
        except InfeasibleError:
            if problem.options.zero == "auto" and self.below < math.inf:
                least[key] = max(self.below, least.get(key, 0.0))
            raise

    def _computed(self, problem: Problem, plan: Plan) -> Divided:
        """The plan with stages."""
        wanted = problem.options.recompute
        if wanted != "auto":
            return self._divided(problem, plan, wanted, explain=problem.explain)
        with suppress(InfeasibleError, UndecidedError):
            return self._divided(problem, plan, wanted, explain=False)
        if not problem.explain:
            message = "no division into stages fits the memory, every block recomputed or not"
            raise InfeasibleError(message if self.below == math.inf else _too_long(self.below))
        return self._all_or_nothing(problem, plan)

    def _all_or_nothing(self, problem: Problem, plan: Plan) -> Divided:
        """A division with nothing, or else everything, recomputed. Raises InfeasibleError with the
        reasons for both."""
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
    ) -> Divided:
        """Divide as the user asked: automatically, evenly, or by counts."""
        stages = problem.options.stages
        if stages == "auto":
            return self._automatic(problem, plan, wanted, explain=explain)
        level, stage_of = given.division(problem, stages, len(outline(plan).placement))
        division, plan = _fitted(problem, plan, level, stage_of, wanted)
        return Divided(_decided(problem, plan, level, division))

    def _automatic(self, problem: Problem, plan: Plan, wanted: Wanted, *, explain: bool) -> Divided:
        """The division with the shortest step on the timeline: the solver's, the runs it started
        from, even stages, or the best of these improved by moving blocks."""
        shortest = _Shortest(problem, plan, wanted, self.gain, seconds=self.below)
        level: int | None = None
        others: list[tuple[int, tuple[int, ...]]] = []
        refusal: InfeasibleError | UndecidedError | None = None
        try:
            solved, (level, division, trial) = self._solved(problem, plan, wanted, explain=explain)
        except (InfeasibleError, UndecidedError) as error:
            refusal = error
        else:
            shortest.bounds = {k: result.bound for k, result in solved.items()}
            for k in (level, *(k for k in solved if k != level)):
                others += [(k, stage_of) for stage_of in (solved[k].stage_of, *solved[k].others)]
            decided = _decided(problem, trial, level, division)
            try:
                shortest.take(decided, level, division.stage_of)
            except PlanError:  # an order that never ends: the verifier says why
                return Divided(decided)
        for alternative in (*others, *_alternatives(problem, plan, level)):
            shortest.consider(*alternative)
        if shortest.plan is None:
            if refusal is None:
                raise InfeasibleError(_too_long(self.below))
            needed, lean = getattr(refusal, "needed", None) or 0, shortest.leanest
            if lean is not None and (lean.needed or needed) < (1 - FAR) * needed:
                lean.add_note("of the divisions that were tried, that needs least")
                raise lean from refusal  # the solver counts more bytes than the timeline
            raise refusal
        finer = [one for k, one in shortest.by_level.items() if k > shortest.level]
        shortest.improve()
        for one in finer:  # moves of smaller blocks lead further
            one.improve()
            if one.seconds < (1 - self.gain) * shortest.seconds:
                one.missed = min(one.missed, shortest.missed)
                shortest = one
        assert shortest.plan is not None, "it was taken"
        return Divided(shortest.plan, shortest.missed)

    def _solved(
        self, problem: Problem, plan: Plan, wanted: Wanted, *, explain: bool
    ) -> tuple[dict[int, StageDivision], tuple[int, StageDivision, Plan]]:
        """The solver's divisions by granularity, and of them that at the coarsest one that is good
        enough, with a plan with the blocks that are recomputed then."""
        solved: dict[int, StageDivision] = {}
        best: tuple[int, StageDivision, Plan] | None = None
        refusal: InfeasibleError | None = None
        for level in problem.levels:
            priced = problem.priced(level)
            if best is not None and len(priced.cut.blocks) == len(
                problem.priced(best[0]).cut.blocks
            ):
                continue
            try:
                division, trial = _fitting(
                    problem, plan, level, wanted, below=self.below, explain=explain
                )
            except InfeasibleError as error:
                refusal = error
                continue
            solved[level] = division
            if best is None or division.objective < (1 - self.gain) * best[1].objective:
                best = level, division, trial
            seconds = best[1].objective
            if plan.mesh.pipeline > 1:  # one rank has nothing to even out
                decided = _decided(problem, best[2], best[0], best[1])
                with suppress(PlanError):  # an order that never ends
                    seconds = max(seconds, estimate(problem, decided).step_time)
            if seconds <= (1 + self.slack) * _fill_and_drain(problem, best[2], best[0]):
                break
        if best is None:
            assert refusal is not None
            stages = len(outline(plan).placement)
            blocks = problem.priced(problem.levels[-1]).cut.blocks
            if problem.explain and stages > len(blocks):
                refusal.add_note(why_so_few(problem.graph))
            raise refusal
        return solved, best


class Divided(NamedTuple):
    """A plan with stages. The fastest division that was tried, and that does not fit unless blocks
    are recomputed, takes `missed` seconds, or more if its head is shared."""

    plan: Plan
    missed: float = math.inf


def _too_long(below: float) -> str:
    """Why no division is of use."""
    return f"no division was found that fits the memory and has a step below {below:.6g} s"


def _alternatives(
    problem: Problem, plan: Plan, level: int | None
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Granularities and stages to compare with the solver's at `level`: stages even in layers or in
    blocks; where it failed, also even in seconds and in bytes."""
    stages = len(outline(plan).placement)
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
        for k in (k for k, blocks in sizes.items() if blocks >= stages):
            task = division_task(problem, as_asked(problem, plan, k), k)
            pairs = paired_runs(dataclasses.replace(task, limits=[math.inf] * task.ranks))
            yield from [(k, pairs)] if pairs is not None else ()


@dataclass
class _Shortest:
    """The division with the shortest step of those considered so far; the first of equal ones.
    Finer blocks are taken where they save `gain`."""

    problem: Problem
    start: Plan
    wanted: Wanted
    gain: float
    plan: Plan | None = None
    seconds: float = math.inf
    level: int = 0
    stage_of: tuple[int, ...] = ()
    bounds: dict[int, float] = field(default_factory=dict)  # of the solver's formula
    considered: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)
    leanest: InfeasibleError | None = None  # the refusal that needs the least memory
    missed: float = math.inf  # see `Divided`
    by_level: dict[int, _Shortest] = field(default_factory=dict)  # the last taken at each

    def take(self, plan: Plan, level: int, stage_of: tuple[int, ...]) -> bool:
        """Keep a feasible plan if its step is the shortest so far; returns whether it is."""
        seconds = estimate(self.problem, plan).step_time
        if seconds >= self._enough(level):
            return False
        if not self.problem.gathers:  # there the seconds of blocks have the exchange
            seconds = step_of(self.problem, plan)
        if self.plan is not None and seconds >= self._enough(level):
            return False  # the first is taken: a level of ZeRO that is open may exchange less
        self.plan, self.seconds, self.level, self.stage_of = plan, seconds, level, stage_of
        self.by_level[level] = dataclasses.replace(self, by_level={})
        return True

    def consider(self, level: int, stage_of: tuple[int, ...]) -> bool:
        """Keep these stages if they fit and their step is the shortest so far."""
        least = _least_step(self.problem, self.start, level, stage_of)
        enough = self._enough(level)
        if least >= enough or (level, stage_of) in self.considered:
            return False
        self.considered.add((level, stage_of))
        seconds = math.inf
        if self.wanted in ("none", "auto"):
            bare = _recomputing(self.problem, self.start, level, "none")
            seconds = alone(self.problem, placed(self.problem, bare, level, stage_of))
            if seconds >= enough:
                return False
        try:
            division, trial = _fitted(self.problem, self.start, level, stage_of, self.wanted)
        except UndecidedError:
            return False
        except InfeasibleError as error:
            self.missed = min(self.missed, seconds)
            if error.needed and (not self.leanest or error.needed < (self.leanest.needed or 0)):
                self.leanest = error
            return False
        if trial.recompute:
            self.missed = min(self.missed, seconds)
        if level not in self.bounds:
            self.bounds[level] = _fill_and_drain(self.problem, self.start, level)
        division = _bounded(division, self.bounds[level])
        return self.take(_decided(self.problem, trial, level, division), level, stage_of)

    def _enough(self, level: int) -> float:
        """The seconds that a division at a granularity must be below."""
        saved = self.gain if self.plan is not None and level > self.level else ROUNDING
        return (1 - saved) * self.seconds

    def improve(self) -> None:
        """Local search: move a block to a neighbouring stage as long as that shortens the step.

        Pairs of moves are tried too where values skip blocks; elsewhere they gained nothing. The
        number of simulated steps is limited by their size (`EFFORT`). For a chain with one stage
        on each rank the solver's formula agrees with the timeline, and its optimum is kept. So is
        it under a vocabulary on all ranks, whose steps take ten times as long to simulate.
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
    """The stages after one move of a block, or `twice`."""
    yield from _moved(stage_of)
    if twice:
        yield from chain.from_iterable(map(_moved, _moved(stage_of)))


def _moved(stage_of: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The stages after each move of a stage's last block to the next stage, or its first block to
    the one before: no value goes backwards then."""
    for j in range(max(stage_of)):
        for source, target in ((j, j + 1), (j + 1, j)):
            blocks = [i for i, at in enumerate(stage_of) if at == source]
            if len(blocks) > 1:
                i = blocks[-1] if target > source else blocks[0]
                yield (*stage_of[:i], target, *stage_of[i + 1 :])


def _least_step(problem: Problem, plan: Plan, level: int, stage_of: Sequence[int]) -> float:
    """Lower bound of a division's step with any recomputation: the busiest rank, never idle."""
    placement, busy = outline(plan).placement, [0.0] * plan.mesh.pipeline
    for load, j in zip(data(problem, level)[0], stage_of, strict=True):
        busy[placement[j]] += load.on(placement[j])
    return plan.microbatches * max(busy) + least_update(problem)


def _bounded(division: StageDivision, bound: float) -> StageDivision:
    """The division with a proved lower bound of the solver's formula."""
    gap = relative_gap(division.objective, bound)
    status = "feasible" if gap else "optimal"
    return dataclasses.replace(division, status=status, bound=bound, gap=gap)


def _recomputing(problem: Problem, plan: Plan, level: int, wanted: Wanted) -> Plan:
    """The plan with the blocks recomputed that the option asks for, at a granularity."""
    return dataclasses.replace(plan, recompute=chosen(problem, level, wanted))


def _fitting(
    problem: Problem, plan: Plan, level: int, wanted: Wanted, *, below: float, explain: bool
) -> tuple[StageDivision, Plan]:
    """The solver's division at a granularity whose simulated step fits into the memory, and a plan
    with the blocks that are recomputed in it.

    The solver does not know how many messages are in flight at once. Bytes by which the simulated
    step is over the memory are reserved in the next attempt. Raises InfeasibleError for a step that
    is not below `below` seconds.
    """
    free = [0] * len(problem.memories)
    while True:
        division, trial = _divide(problem, plan, level, wanted, free, explain=explain)
        decided = _decided(problem, trial, level, division)
        if below < math.inf and alone(problem, decided) >= below:
            raise InfeasibleError(_too_long(below))
        over = _over(problem, decided)
        if max(over) <= 0:
            return division, trial
        free = list(_freer(problem, free, over))


def _over(problem: Problem, plan: Plan) -> list[int]:
    """Bytes by which the simulated step exceeds the memory of each rank; 0 for an order that
    deadlocks."""
    try:
        peaks = estimate(problem, plan).peak_memory
    except PlanError:  # the verifier says why
        return [0] * len(problem.memories)
    return [peak - memory for peak, memory in zip(peaks, problem.memories, strict=True)]


def _freer(problem: Problem, free: Sequence[int], over: Sequence[int]) -> Iterator[int]:
    """Bytes to reserve on each rank after an attempt that was `over` its memory; ranks with the
    same device reserve the same."""
    devices = problem.devices
    for kept, device in zip(free, devices, strict=True):
        most = max(size for size, other in zip(over, devices, strict=True) if other == device)
        yield kept + max(most, math.ceil(problem.room(device) * STEP)) if most > 0 else kept


def _divide(
    problem: Problem, plan: Plan, level: int, wanted: Wanted, free: Sequence[int], *, explain: bool
) -> tuple[StageDivision, Plan]:
    """The solver's division at a granularity with `free` bytes of each rank reserved, and a plan
    with the blocks that are recomputed in it."""
    memories = problem.memories
    besides = [reserved(problem, plan) + kept for kept in free]
    limits = [memory - kept for memory, kept in zip(memories, besides, strict=True)]
    is_free = wanted == "auto"
    if not is_free:
        plan = _recomputing(problem, plan, level, wanted)
    blocks = problem.priced(level).cut.blocks
    check_count(outline(plan).placement, len(blocks))  # before what is held, which takes longer
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
        if most:
            kept = f"{most:,} bytes" if most == min(besides) else f"up to {most:,} bytes"
            error.add_note(f"{kept} of it are kept free for messages, batch and vocabulary")
        raise
    if is_free:
        plan = dataclasses.replace(plan, recompute=names_of(problem, level, division.twice))
    return division, plan


def _fitted(
    problem: Problem, plan: Plan, level: int, stage_of: Sequence[int], wanted: Wanted
) -> tuple[StageDivision, Plan]:
    """A division into these stages, and a plan with the blocks that are recomputed in it. Raises
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
    """A division into stages that fit only if some blocks are recomputed."""
    memories = problem.memories
    free = [reserved(problem, plan)] * len(memories)
    while True:
        limits = [memory - kept for memory, kept in zip(memories, free, strict=True)]
        twice = spared(division_task(problem, plan, level, limits, is_free=True), stage_of)
        if twice is None:  # by the solver's bytes, which may be too many
            trial = _recomputing(problem, plan, level, "full")
            return _evaluated(problem, trial, level, stage_of), trial
        trial = dataclasses.replace(plan, recompute=names_of(problem, level, twice))
        division = _priced(problem, trial, level, stage_of)
        over = _over(problem, _decided(problem, trial, level, division))
        if max(over) <= 0:
            return _bounded(division, _fill_and_drain(problem, plan, level)), trial
        free = list(_freer(problem, free, over))


def _priced(problem: Problem, plan: Plan, level: int, stage_of: Sequence[int]) -> StageDivision:
    """A division into these stages, with the seconds of the solver's formula."""
    data, order = data_under(problem, plan, level), outline(plan)
    evaluation = evaluate(*data, stage_of, order.placement, plan.microbatches, held(plan))
    return StageDivision(tuple(stage_of), "given", evaluation.objective, 0.0, 1.0)


def _evaluated(problem: Problem, plan: Plan, level: int, stage_of: Sequence[int]) -> StageDivision:
    """A division into these stages. Raises InfeasibleError where the step does not fit."""
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
        free = f" (and keeps {problem.spare:.0%} free, as parameters are gathered)"
        error = InfeasibleError(
            f"rank {worst} of this division needs {memory[worst]:,} bytes, "
            f"{device.name} has {room:,}{free if problem.spare else ''}, "
            f"{memory[worst] - room:,} less; the largest part is "
            f"{largest.what} ({largest.size:,} bytes)"
            f"{'' if problem.options.stages == 'auto' else MAYBE}"
        )
        error.needed = memory[worst]
        raise error
    return division


def reconsidered(problem: Problem, plan: Plan) -> Plan:
    """A finished plan; the solver's statement about it is replaced if its stages were edited.

    Raises InfeasibleError when a rank does not fit into the memory.
    """
    assert plan.granularity is not None
    assert plan.stages is not None
    home = {name: j for j, choice in enumerate(plan.stages) for name in choice.blocks}
    blocks = problem.priced(plan.granularity).cut.blocks
    stage_of = tuple(home[block.name] for block in blocks)
    try:
        division = _evaluated(problem, plan, plan.granularity, stage_of)
    except InfeasibleError:
        raise
    except PlanError:  # an order that never ends: the verifier says why
        return plan
    if plan.solution is not None and plan.solution.objective == division.objective:
        return plan
    return dataclasses.replace(plan, solution=_solution(division))


def _solution(division: StageDivision) -> Solution:
    """The solver's statement about a division, for the plan."""
    return Solution(division.status, division.objective, division.bound, division.gap)


def _decided(problem: Problem, plan: Plan, level: int, division: StageDivision) -> Plan:
    """The plan with a division."""
    placed_plan = placed(problem, plan, level, division.stage_of)
    return dataclasses.replace(placed_plan, solution=_solution(division))


def placed(problem: Problem, plan: Plan, level: int, stage_of: Sequence[int]) -> Plan:
    """The plan with the blocks of a granularity on these stages."""
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
    """Step time of a perfectly even division without messages, in seconds."""
    stages, ranks = len(outline(plan).placement), plan.mesh.pipeline
    recompute = plan.recompute or ()
    total = sum(load.seconds for load in data(problem, level, recompute=recompute)[0])
    pace = problem.recomputing(level, recompute).pace or ranks
    return total * ranks / stages + (plan.microbatches - 1) * total / pace


def ideal(problem: Problem, plan: Plan) -> float:
    """Step time of evenly loaded ranks without idle time, in seconds: no schedule is faster.

    Recomputation counts only where the user asked for it: another schedule may not need it.
    """
    assert plan.granularity is not None
    forced = problem.options.recompute == "auto"
    priced = problem.priced(plan.granularity) if forced else problem.under(plan)
    spread = vocabulary_cost(problem, plan)
    everywhere = spread.compute if spread else 0.0
    blocks = sum((*priced.forward, *priced.backward)) / (priced.pace or plan.mesh.pipeline)
    return plan.microbatches * (blocks + everywhere)
