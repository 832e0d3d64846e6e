"""The error for too little memory: says the least limit that would do, and the largest part."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from parcompiler.errors import InfeasibleError
from parcompiler.passes.divide.data import memory_parts
from parcompiler.passes.divide.improve import slim_runs
from parcompiler.passes.divide.task import DivisionTask

SHOWN = 8  # ranks that an error lists: those that take most


def too_little_memory(
    task: DivisionTask,
    names: Sequence[str],
    besides: Sequence[int] = (),
    memory_of: Sequence[int] = (),
) -> InfeasibleError:
    """The error that says the least limit that would do, and what takes most of it.

    `memory_of` are the bytes of each rank, of which `besides` are not for blocks.
    """
    stage_of, proven = slim_runs(task), task.each == 1 and task.is_linked
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
    limit = f"{room:,} bytes {f'a {place}' if alike else f'on {place} {worst}'}"
    least = f"the least {'that would' if proven else 'found to'} do is {needed:,} bytes"
    fits = "fits" if task.each == 1 else "was found that fits"
    missing = max(1, memory[worst] + besides[worst] - room)
    more = "add stages" if task.each == 1 else "add ranks"
    error = InfeasibleError(
        f"no division into {task.stages} stages {fits} the memory limit ({limit}; {least}"
        f"{'' if alike else ', when all limits grow alike'}): {place} {worst} lacks {missing:,} "
        f"bytes. Raise the limit, {more}, or recompute activations. The largest part there is "
        f"{largest.what} ({largest.size:,} bytes)"
    )
    error.needed = needed
    sizes = [size + more for size, more in zip(memory, besides, strict=True)]
    for rank in sorted(sorted(range(task.ranks), key=sizes.__getitem__)[-SHOWN:]):
        names_there = [n for n, j in zip(names, stage_of, strict=True) if task.placement[j] == rank]
        taken = f"{place} {rank} takes {sizes[rank]:,} bytes"
        error.add_note(f"with that limit, {taken}: {_in_short(names_there)}")
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
