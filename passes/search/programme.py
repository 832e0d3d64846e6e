"""The search as an agenda for CP-SAT, in whole units of time, all seconds rounded down.

[1] actions of one class, and messages on one way, are in the order of micro-batches;
[2] a rank does one thing at a time, a link carries one message at a time;
[3] the memory of a rank is a store; micro-batch i + n waits for micro-batch i if only n fit.

Rounding down and leaving out message buffers relax the agenda, so that its bound holds for every
order. Its start times give words, which are timed exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from parcompiler.errors import InfeasibleError
from parcompiler.passes.search.anneal import Walked
from parcompiler.passes.search.task import SearchTask, Word
from parcompiler.solver import Agenda, UndecidedError, agree

UNITS = 1 << 24  # units of time in the known step
SHARES = 1 << 12  # units of memory on a rank


@dataclass(slots=True)
class _Draft:
    """An agenda, and its tasks by code."""

    task: SearchTask
    unit: float
    agenda: Agenda
    number: dict[int, int] = field(default_factory=dict)

    def whole(self, seconds: float) -> int:
        """Seconds in units, rounded down."""
        return int(seconds / self.unit)


def prove(task: SearchTask, best: Walked, effort: float) -> tuple[list[Word] | None, float]:
    """Words that may be better than the best ones, and a lower bound on the seconds of any."""
    draft = _draft(task, best)
    agenda = draft.agenda
    try:
        agreement = agree(agenda, effort=effort)
    except InfeasibleError:  # nothing is better by a unit
        return None, best.step_time - draft.unit
    except UndecidedError as undecided:
        return None, undecided.bound * draft.unit
    words = [
        sorted(word, key=lambda code: (agreement.begins[draft.number[code]], _place(task, code)))
        for word in best.words
    ]
    return words, agreement.bound * draft.unit


def _place(task: SearchTask, code: int) -> tuple[int, int]:
    """Breaks ties of actions that take no time: by micro-batch, forwards first."""
    kind, i = divmod(code, task.microbatches)
    return i, kind % 3


def _draft(task: SearchTask, best: Walked) -> _Draft:
    """The agenda of a task; its horizon excludes orders that are no better than the best."""
    draft = _Draft(task, best.step_time / UNITS, Agenda(horizon=UNITS))
    m = task.microbatches
    for kinds in task.classes:
        for kind in kinds:
            for i in range(m):
                name, duration = f"x[{kind},{i}]", draft.whole(task.durations[kind])
                draft.number[kind * m + i] = draft.agenda.task(name, duration)
            _in_turn(draft, [draft.number[kind * m + i] for i in range(m)])
        draft.agenda.machines.append(
            [draft.number[kind * m + i] for kind in kinds for i in range(m)]
        )
    _send(draft)
    _wait(draft)
    _remember(draft)
    begins = task.run(best.words).begins
    for code, number in draft.number.items():
        if code < task.pipeline.size:
            draft.agenda.hints[number] = draft.whole(begins[code])
    return draft


def _in_turn(draft: _Draft, numbers: Sequence[int]) -> None:
    """One after the other. [1]"""
    for first, second in pairwise(numbers):
        draft.agenda.after(first, second)


def _send(draft: _Draft) -> None:
    """Messages begin after the actions that send them, one at a time on each link. [2]"""
    m = draft.task.microbatches
    links: dict[tuple[int, int], list[int]] = {}
    for kind, sends in enumerate(draft.task.pipeline.sends):
        for row, source, target, *_ in sends:
            seconds, link = draft.task.seconds[row], (source, target)
            if row not in draft.number:
                for i in range(m):
                    name, duration = f"y[{row},{i}]", draft.whole(seconds)
                    draft.number[row + i] = draft.agenda.task(name, duration)
                numbers = [draft.number[row + i] for i in range(m)]
                _in_turn(draft, numbers)
                if draft.whole(seconds):
                    links.setdefault(link, []).extend(numbers)
            for i in range(m):
                draft.agenda.after(draft.number[kind * m + i], draft.number[row + i])
    draft.agenda.machines += [numbers for numbers in links.values() if len(numbers) > m]


def _wait(draft: _Draft) -> None:
    """Actions begin after the messages and actions that they need."""
    m = draft.task.microbatches
    for kinds in draft.task.classes:
        for kind in kinds:
            for row in draft.task.pipeline.needs[kind]:
                for i in range(m):
                    draft.agenda.after(draft.number[row + i], draft.number[kind * m + i])


def _remember(draft: _Draft) -> None:
    """The memory of each rank suffices. [3]"""
    task, m = draft.task, draft.task.microbatches
    for rank, kinds in enumerate(task.classes):
        stages = sorted({kind // 3 for kind in kinds})
        last = {j: 3 * j + (2 if task.is_parted(j) else 1) for j in stages}
        for j in stages:
            together = int(task.rooms[rank] // task.sizes[j]) if task.sizes[j] else m
            for i in range(m - together):
                number = draft.number[last[j] * m + i]
                draft.agenda.after(number, draft.number[3 * j * m + i + together])
        room = task.rooms[rank]
        if len(stages) > 1 and m * sum(task.sizes[j] for j in stages) > room:
            draft.agenda.store(
                SHARES,
                [
                    (draft.number[3 * j * m + i], draft.number[last[j] * m + i], size)
                    for j in stages
                    if (size := int(task.sizes[j] * SHARES / room))
                    for i in range(m)
                ],
            )
