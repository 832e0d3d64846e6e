"""Divide blocks into stages and choose those that run twice, in one programme.

Beside what `divide` is given, some blocks may run twice: block i is then another load, which takes
longer and saves less. To the programme of `divide` comes

Decide      w[i,j]      1 iff block i is on stage j and runs twice
Subject to  a block is there to run twice     w[i,j] <= x[i,j]                     `_run_twice`
and in every sum x[i,j] stands with the numbers of the block that runs once, and w[i,j] with those
of the one that runs twice less those.

Where every block reads of the one before it, and ranks have one stage, all divisions are runs, and
a dynamic programme over them is exact (`spans`). Else the stages come from two divisions, with
nothing and with everything running twice, and each rank spares what it can (`Repeatable.spared`);
then the programme says whether there is something better, or something at all, where it is not too
large for that.

Ties: nothing runs twice where that is as good.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from parcompiler.errors import InfeasibleError
from parcompiler.passes.divide import SHORTER, divide
from parcompiler.passes.divide.again import Repeatable
from parcompiler.passes.divide.data import Flow, Load, StageDivision
from parcompiler.passes.divide.programme import LARGE, LARGEST, Layout, lay_out, minimize_time
from parcompiler.passes.divide.spans import RunsTwice, Spans
from parcompiler.passes.divide.task import DivisionTask, check_task
from parcompiler.passes.divide.windows import find_windows
from parcompiler.solver import EFFORT, Term, UndecidedError, Variable, relative_gap, solve


@dataclass(frozen=True, slots=True)
class Joint:
    """A division, and the blocks that run twice in it."""

    division: StageDivision
    twice: frozenset[int]


def divide_twice(
    loads: Sequence[Load],
    again: Sequence[Load | None],
    flows: Sequence[Flow],
    placement: Sequence[int],
    microbatches: int,
    held: Sequence[Sequence[tuple[int, ...]]],
    limits: Sequence[float],
    *,
    effort: float = EFFORT,
) -> Joint:
    """The division and the blocks that run twice whose step takes the fewest seconds.

    `again` has, for each block, what it is when it runs twice; None for one that must not. The rest
    is as for `divide`. Raises InfeasibleError when nothing fits (it does not look for what would),
    UndecidedError when the search found nothing and did not prove that, InputError as `divide`.
    """
    task = DivisionTask(loads, flows, placement, microbatches, held, limits)
    check_task(task)
    tried: set[tuple[int, ...]] = set()
    result = _divide_twice(task, again, effort, tried)
    others = tried.union(result.division.others) - {result.division.stage_of}
    division = dataclasses.replace(result.division, others=tuple(sorted(others)))
    return Joint(division, result.twice)


def _divide_twice(
    task: DivisionTask, again: Sequence[Load | None], effort: float, tried: set[tuple[int, ...]]
) -> Joint:
    """The best division and the blocks that run twice in it; what was `tried` is added to that."""
    free = _free(task, effort) if task.each > 1 else None
    if free is not None:
        tried.update((free.stage_of, *free.others))
    if free is not None and _fits(task, free.stage_of):
        return Joint(free, frozenset())
    plain, joint = _plain(task, effort), Repeatable(task, tuple(again))
    if plain is not None and not _is_large(task) and _is_unbound(task, plain, effort):
        return Joint(plain, frozenset())
    known = math.inf if plain is None else joint.objective(plain.stage_of, ())
    if task.each == 1 and task.links is not None:
        found, bound = Spans(joint).best(known), None
    else:
        found, bound = _searched(joint, known, plain, effort, tried)
    if found is not None:
        return _made(joint, found, bound)
    if plain is None:
        message = "no division satisfies the limits, whatever runs twice"
        raise InfeasibleError(message)
    return Joint(_proven(joint, plain, bound), frozenset())


def _plain(task: DivisionTask, effort: float) -> StageDivision | None:
    """The best division in which nothing runs twice, if there is one."""
    given = task.loads, task.flows, task.placement, task.microbatches, task.held, task.limits
    with suppress(InfeasibleError, UndecidedError):
        return divide(*given, effort=effort, explain=False)
    return None


def _is_large(task: DivisionTask) -> bool:
    """Whether memory binds a task of several stages a rank that is too large to search."""
    return task.each > 1 and len(task.loads) * task.stages > LARGE and task.most > min(task.room)


def _is_unbound(task: DivisionTask, plain: StageDivision, effort: float) -> bool:
    """Whether more memory would not shorten the step."""
    if task.most <= min(task.room):
        return True
    free = _free(task, effort)
    return free is not None and plain.objective <= free.bound


def _free(task: DivisionTask, effort: float) -> StageDivision | None:
    """The best division if memory were no matter, if there is one."""
    given = tuple(task.loads), tuple(task.flows), tuple(task.placement), task.microbatches
    return _unlimited(*given, effort)


@lru_cache(maxsize=64)  # schedules of one placement differ in what they hold alone
def _unlimited(
    loads: tuple[Load, ...],
    flows: tuple[Flow, ...],
    placement: tuple[int, ...],
    microbatches: int,
    effort: float,
) -> StageDivision | None:
    """The same."""
    ranks = max(placement) + 1
    held = [((1,) * (len(placement) // ranks),)] * ranks
    limits = [math.inf] * ranks
    return _plain(DivisionTask(loads, flows, placement, microbatches, held, limits), effort)


def _fits(task: DivisionTask, stage_of: Sequence[int]) -> bool:
    """Whether a division takes no more memory than there is."""
    memory = task.evaluate(stage_of).memory
    return all(size <= limit for size, limit in zip(memory, task.limits, strict=True))


def _made(joint: Repeatable, found: RunsTwice, bound: float | None) -> Joint:
    """The result; `bound` is in units, None where nothing is better."""
    stage_of, twice = found
    objective = joint.under(twice).evaluate(stage_of).objective
    given = StageDivision(stage_of, "optimal", objective, objective, 0.0)
    return Joint(given if bound is None else _proven(joint, given, bound), twice)


def _proven(joint: Repeatable, division: StageDivision, bound: float | None) -> StageDivision:
    """A division of which it is known that no other is below a bound in units."""
    objective = division.objective
    if bound is None:
        return dataclasses.replace(division, status="optimal", bound=objective, gap=0.0)
    least = min(objective, bound * joint.task.unit / joint.task.each)
    gap = relative_gap(objective, least)
    return dataclasses.replace(division, status="feasible", bound=least, gap=gap)


def _searched(
    joint: Repeatable,
    known: float,
    plain: StageDivision | None,
    effort: float,
    tried: set[tuple[int, ...]],
) -> tuple[RunsTwice | None, float | None]:
    """The best found that is below `known` units, and a bound; None when it is proven.

    Raises UndecidedError when nothing is found or known, and no proof that there is nothing.
    """
    best: RunsTwice | None = None
    for stage_of in _starts(joint, plain, effort):
        tried.add(stage_of)
        twice = joint.spared(stage_of)
        if twice is not None and (units := joint.objective(stage_of, twice)) < known:
            best, known = (tuple(stage_of), twice), units
    if _is_large(joint.task):
        if known == math.inf:  # not even with all that can running twice, in stages for that
            raise UndecidedError(effort, _bound(joint))
        return best, _bound(joint)
    windows = find_windows(joint.leanest, known)
    if windows is None:
        return best, None
    bare = [dataclasses.replace(load, moment=0) for load in joint.task.loads]
    layout = lay_out(dataclasses.replace(joint.task, loads=bare), windows)
    layout = dataclasses.replace(layout, task=joint.task)
    most = LARGE if joint.task.each > 1 else LARGEST
    if len(layout.model.variables) > most and known < math.inf:
        return best, _bound(joint)
    twice_at = _run_twice(layout, joint)
    _limit_memory(layout, joint, twice_at)
    _minimize_time(layout, joint, twice_at)
    if known < math.inf or joint.task.each > 1:
        effort *= SHORTER
    try:
        solution = solve(layout.model, effort=effort)
    except InfeasibleError:
        return best, None
    except UndecidedError as undecided:
        if known == math.inf:
            raise
        return best, min(known, undecided.bound)
    if solution.objective < known:
        found = layout.read(solution.values)
        chosen = {i for (i, _), here in twice_at.items() if solution[here]}
        best, known = (found, frozenset(chosen)), solution.objective
    is_proven = solution.status == "optimal" or solution.bound >= known
    return best, None if is_proven else min(known, solution.bound)


def _bound(joint: Repeatable) -> float:
    """Units of ranks that are even and run nothing twice; each block where it takes least."""
    total = sum(joint.task.compute)
    return float(total + joint.task.further * total / joint.task.pace(range(joint.task.ranks)))


def _starts(joint: Repeatable, plain: StageDivision | None, effort: float) -> list[tuple[int, ...]]:
    """Stages to begin with: those without what runs twice, and those where all that can does."""
    every = [i for i, twice in enumerate(joint.again) if twice is not None]
    full = _plain(joint.under(every), effort)
    found = [division.stage_of for division in (plain, full) if division is not None]
    if not _is_large(joint.task):
        free = _free(joint.task, effort)
        found += [] if free is None else [free.stage_of]
    return found


def _run_twice(layout: Layout, joint: Repeatable) -> dict[tuple[int, int], Variable]:
    """The blocks that run twice are where they are."""
    model, found = layout.model, {}
    for (i, j), here in layout.x.items():
        if joint.again[i] is not None:
            found[i, j] = model.binary(f"w[{i},{j}]")
            model.constrain([(1, here), (-1, found[i, j])], low=0)
    return found


def _limit_memory(
    layout: Layout, joint: Repeatable, twice_at: dict[tuple[int, int], Variable]
) -> None:
    """A rank takes no more bytes than it has, in whatever moment."""
    task, model = joint.task, layout.model
    for rank, room in enumerate(task.room):
        moment = _hold_moment(layout, joint, twice_at, rank)
        for counts in task.held[rank]:
            terms = [*layout.memory(rank, counts), (1, moment)]
            for k, j in zip(counts, task.on[rank], strict=True):
                for i, twice in enumerate(joint.again):
                    if twice is not None and (i, j) in twice_at:
                        load = task.loads[i]
                        more = twice.resident - load.resident + k * (twice.saved - load.saved)
                        terms.append((more, twice_at[i, j]))
            model.constrain(terms, high=room)


def _hold_moment(
    layout: Layout, joint: Repeatable, twice_at: dict[tuple[int, int], Variable], rank: int
) -> Variable:
    """What a rank takes while it computes one of its blocks, in the way that this one runs."""
    task, model = joint.task, layout.model
    loads = [*task.loads, *filter(None, joint.again)]
    moment = model.integer(f"a[{rank}]", 0, max(load.moment for load in loads))
    for (i, j), here in layout.x.items():
        if task.placement[j] == rank:
            size, twice = task.loads[i].moment, joint.again[i]
            if twice is None:
                model.constrain([(1, moment), (-size, here)], low=0)
            else:
                again = twice_at[i, j]
                model.constrain([(1, moment), (-size, here), (size, again)], low=0)
                model.constrain([(1, moment), (-twice.moment, again)], low=0)
    return moment


def _minimize_time(
    layout: Layout, joint: Repeatable, twice_at: dict[tuple[int, int], Variable]
) -> None:
    """The step time, with what runs twice."""
    task, model = joint.task, layout.model
    slowest = minimize_time(layout, 0)
    extra = joint.extra
    more = {(i, j): (extra[task.placement[j]][i], here) for (i, j), here in twice_at.items()}
    for rank in range(task.ranks):
        own = [term for (_, j), term in more.items() if task.placement[j] == rank]
        terms: list[Term] = [*layout.seconds(rank), *own, (-1, slowest)]
        model.constrain(terms, high=0)
    model.minimize([*model.objective, *more.values()], model.constant)
