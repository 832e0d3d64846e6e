"""What to say when memory does not suffice: the least limit that would do, and the largest part."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

from parcompiler.errors import InfeasibleError
from parcompiler.passes.divide.data import memory_parts
from parcompiler.passes.divide.improve import lean_runs, slimmed
from parcompiler.passes.divide.programme import Layout, lay_out, limit_memory
from parcompiler.passes.divide.runs import nothing_better
from parcompiler.passes.divide.task import DivisionTask
from parcompiler.passes.divide.windows import find_windows
from parcompiler.solver import UndecidedError, solve

SHOWN = 8  # ranks that an error lists: those that take most


def too_little_memory(
    task: DivisionTask,
    names: Sequence[str],
    effort: float,
    besides: Sequence[int] = (),
    memory_of: Sequence[int] = (),
) -> InfeasibleError:
    """The least limit that would do, and what takes most of it.

    Where ranks have `memory_of` bytes, `besides` of them are not for blocks.
    """
    stage_of, proven = _leanest(task, effort)
    names = names or [f"block {i}" for i in range(len(task.loads))]
    memory = task.evaluate(stage_of).memory
    worst = max(range(task.ranks), key=lambda rank: Fraction(memory[rank], task.room[rank]))
    alike = len(set(task.room)) == 1
    place = "stage" if tuple(task.placement) == tuple(range(task.stages)) else "rank"
    parts = memory_parts(task.loads, task.flows, stage_of, task.placement, task.held, worst, names)
    largest = max(parts, key=lambda part: part.size)
    besides = besides or [0] * task.ranks
    room = memory_of[worst] if memory_of else task.room[worst] + besides[worst]
    needed = memory[worst] + besides[worst]
    given = f"{room:,} bytes {f'a {place}' if alike else f'on {place} {worst}'}"
    least = f"the least {'that would' if proven else 'found to'} do is {needed:,} bytes"
    missing = max(1, memory[worst] + besides[worst] - room)
    more = "add stages" if task.each == 1 else "add ranks"
    error = InfeasibleError(
        f"no division into {task.stages} stages fits the memory limit ({given}; {least}"
        f"{'' if alike else ', when all limits grow alike'}): {place} {worst} lacks {missing:,} "
        f"bytes. Raise the limit, {more}, or recompute activations. The largest part there is "
        f"{largest.what} ({largest.size:,} bytes)"
    )
    error.needed = needed
    sizes = [size + more for size, more in zip(memory, besides, strict=True)]
    for rank in sorted(sorted(range(task.ranks), key=sizes.__getitem__)[-SHOWN:]):
        here = [n for n, j in zip(names, stage_of, strict=True) if task.placement[j] == rank]
        taken = f"{place} {rank} takes {sizes[rank]:,} bytes"
        error.add_note(f"with that limit, {taken}: {_in_short(here)}")
    if task.ranks > SHOWN:
        error.add_note(f"and {task.ranks - SHOWN} more {place}s take less")
    error.add_note("messages on their way come on top")
    return error


def _in_short(names: Sequence[str]) -> str:
    """The blocks of a stage, on one line.

    >>> _in_short(["a", "b", "c", "d"]), _in_short(["a", "b", "c", "d", "e", "f"])
    ('a, b, c, d', 'a, b, ..., f (6 blocks)')
    """
    if len(names) <= 4:
        return ", ".join(names)
    return f"{', '.join(names[:2])}, ..., {names[-1]} ({len(names)} blocks)"


def _leanest(task: DivisionTask, effort: float) -> tuple[tuple[int, ...], bool]:
    """The division that needs the smallest multiple of the limits; and whether that is proven.

    Each round asks for a division strictly below the last, until there is none.
    """
    stage_of, finished = lean_runs(task), True
    if task.each > 1:
        stage_of = slimmed(task, stage_of)
    while finished:
        memory = task.evaluate(stage_of).memory
        scale = max(map(Fraction, memory, task.room))
        below = [math.ceil(scale * limit) - 1 for limit in task.room]
        try:
            stage_of, finished = _leaner(dataclasses.replace(task, limits=below), effort)
        except (InfeasibleError, UndecidedError) as end:
            return stage_of, isinstance(end, InfeasibleError)
    return stage_of, False


def _leaner(task: DivisionTask, effort: float) -> tuple[tuple[int, ...], bool]:
    """A division of little memory within the limits; and whether the solver finished."""
    windows = find_windows(task, math.inf)
    if windows is None:
        return nothing_better(None), True
    layout = lay_out(task, windows)
    if layout.is_large:
        raise UndecidedError(effort, 0)
    limit_memory(layout)
    _minimize_memory(layout)
    solution = solve(layout.model, effort=effort)
    return layout.read(solution.values), solution.status == "optimal"


def _minimize_memory(layout: Layout) -> None:
    """The largest multiple of a limit: exactly when they are equal, else to a few per cent."""
    task = layout.task
    limits = [max(1, limit) for limit in task.room]
    weights = [min(16 * max(limits) // limit, 2**60 // task.most) for limit in limits]
    common = math.gcd(*weights)
    largest = layout.model.integer("L", 0, task.most * max(weights) // common)
    for rank, weight in enumerate(weights):
        for counts in task.held[rank]:
            terms = [(weight // common * a, here) for a, here in layout.memory(rank, counts)]
            layout.model.constrain([*terms, (-1, largest)], high=0)
    layout.model.minimize([(1, largest)])
