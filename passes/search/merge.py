"""Turns words into orders of compute, with whole backwards wherever they cost nothing.

    I0 W0 F1 -> B0 F1       where W follows its I, one kernel launch and one line less

A whole backward sends its gradient at its end, later by the seconds of W. So each merge is judged
by the step time: first all of a stage at once, then halves of them, and so on, `TRIALS` times at
most.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from parcompiler.passes.search.task import SearchTask, Word, last_end
from parcompiler.schedules import Schedule

TRIALS = 500


def merged(task: SearchTask, words: Sequence[Word]) -> Schedule:
    """The schedule that words stand for, with whole backwards where they do not lengthen it."""
    limit = task.step_time(words)
    whole: set[int] = set()  # codes of I that stand for a whole backward
    stages = range(len(task.placement))
    groups = [_mergeable(task, words, j) for j in stages if task.is_parted(j)]
    groups = [group for group in groups if group]
    for _ in range(TRIALS):
        if not groups:
            break
        group = groups.pop(0)
        trial = whole | set(group)
        if _is_as_good(task, words, trial, limit):
            whole = trial
        elif len(group) > 1:
            middle = len(group) // 2
            groups += [group[:middle], group[middle:]]
    return task.schedule(words, whole)


def _mergeable(task: SearchTask, words: Sequence[Word], stage: int) -> list[int]:
    """The codes of I that are directly followed by their W."""
    m, word = task.microbatches, words[task.placement[stage]]
    return [
        code for code, after in pairwise(word) if code // m == 3 * stage + 1 and after == code + m
    ]


def _is_as_good(task: SearchTask, words: Sequence[Word], whole: set[int], limit: float) -> bool:
    """Whether the step is no longer with these whole backwards, and the memory suffices."""
    m, seconds = task.microbatches, list(task.seconds)
    for code in whole:
        seconds[code] = task.costs[code // m // 3].backward
    shorter = [[code for code in word if code - m not in whole] for word in words]
    step = last_end(shorter, task.run(shorter, seconds).ends)
    return step <= limit and task.fits(words, whole)
