"""What to say when memory does not suffice: the least limit that would do, and the largest part."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

from parcompiler.errors import InfeasibleError
from parcompiler.passes.divide.data import Task, evaluate, memory_parts
from parcompiler.passes.divide.programme import Layout, lay_out, limit_memory
from parcompiler.passes.divide.runs import Run, all_runs, best_runs, nothing_better
from parcompiler.passes.divide.windows import find_windows
from parcompiler.solver import UndecidedError, solve


def too_little_memory(task: Task, names: Sequence[str], effort: float) -> InfeasibleError:
    """The least limit that would do, and what takes most of it."""
    stage_of, proven = _leanest(task, effort)
    names = names or [f"block {i}" for i in range(len(task.loads))]
    memory = evaluate(task.loads, task.flows, stage_of, 1, task.in_flight).memory
    j = max(range(task.stages), key=lambda j: Fraction(memory[j], task.room[j]))
    alike = len(set(task.room)) == 1
    parts = memory_parts(task.loads, task.flows, stage_of, task.in_flight, j, names)
    largest = max(parts, key=lambda part: part.size)
    given = f"{task.room[j]:,} bytes {'a stage' if alike else f'on stage {j}'}"
    least = f"the least {'that would' if proven else 'found to'} do is {memory[j]:,} bytes"
    error = InfeasibleError(
        f"no division into {task.stages} stages fits the memory limit ({given}; {least}"
        f"{'' if alike else ', when all limits grow alike'}): raise the limit, add stages, or "
        f"recompute activations. The largest part there is {largest.what} ({largest.size:,} bytes)"
    )
    for k, size in enumerate(memory):
        here = [name for name, at in zip(names, stage_of, strict=True) if at == k]
        error.add_note(f"with that limit, stage {k} takes {size:,} bytes: {', '.join(here)}")
    return error


def _leanest(task: Task, effort: float) -> tuple[tuple[int, ...], bool]:
    """The division that needs the smallest multiple of the limits; and whether that is proven.

    Each round asks for a division strictly below the last, until there is none.
    """

    def share(j: int, run: Run) -> float:
        return (run.fixed + task.in_flight[j] * run.scaled) / task.room[j]

    found = best_runs(task, all_runs(task), share, lambda label: (label.largest,))
    assert found is not None  # there are enough blocks, and every run fits
    stage_of, finished = found[0], True
    while finished:
        memory = evaluate(task.loads, task.flows, stage_of, 1, task.in_flight).memory
        scale = max(map(Fraction, memory, task.room))
        below = [math.ceil(scale * limit) - 1 for limit in task.room]
        try:
            stage_of, finished = _leaner(dataclasses.replace(task, limits=below), effort)
        except (InfeasibleError, UndecidedError) as end:
            return stage_of, isinstance(end, InfeasibleError)
    return stage_of, False


def _leaner(task: Task, effort: float) -> tuple[tuple[int, ...], bool]:
    """A division of little memory within the limits; and whether the solver finished."""
    windows = find_windows(task, math.inf)
    if windows is None:
        return nothing_better(None), True
    layout = lay_out(task, windows)
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
    for j, weight in enumerate(weights):
        terms = [(weight // common * a, variable) for a, variable in layout.memory(j)]
        layout.model.constrain([*terms, (-1, largest)], high=0)
    layout.model.minimize([(1, largest)])
