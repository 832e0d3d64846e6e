"""Scheduling of tasks that share machines and stores: an agenda in, start times of its tasks out.

Given       d[k]        duration of task k
            machines    sets of tasks of which no two run at once
            sequences   (a, b): b begins after the end of a
            stores      capacities for items, each taken in when its first task begins and given
                        back when its second ends
Decide      x[k]        the start of task k, between 0 and the horizon
Minimize    max over k of x[k] + d[k]

All numbers are whole, so the answer is exact.

>>> agenda = Agenda(horizon=20)
>>> wash = [agenda.task(f"wash {i}", 3) for i in range(2)]
>>> dry = [agenda.task(f"dry {i}", 4) for i in range(2)]
>>> for i in range(2):
...     agenda.after(wash[i], dry[i])
>>> agenda.machines += [wash, dry]
>>> agree(agenda).makespan
11

CP-SAT runs with one worker, a fixed seed and a limit that counts operations, so that equal agendas
have equal start times. Its presolve is off, as for linear programmes (see `linear`), and so are its
linear relaxations: with them, agendas of 50 tasks on 4 machines took minutes instead of 1 s, and
their operations are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from parcompiler.errors import InfeasibleError
from parcompiler.solver.linear import EFFORT, PROPAGATE, Status, UndecidedError, run

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

Held = tuple[int, int, int]
"""The task that takes an item in, the task that gives it back, and the size of the item."""


@dataclass(slots=True)
class Agenda:
    """Tasks, by their numbers, and the machines and stores that they share. All begin at 0 or
    later."""

    horizon: int
    names: list[str] = field(default_factory=list)
    durations: list[int] = field(default_factory=list)
    sequences: list[tuple[int, int]] = field(default_factory=list)
    machines: list[Sequence[int]] = field(default_factory=list)
    stores: list[tuple[int, Sequence[Held]]] = field(default_factory=list)  # capacity, items
    hints: dict[int, int] = field(default_factory=dict)

    def task(self, name: str, duration: int) -> int:
        """Add a task; returns its number."""
        self.names.append(name)
        self.durations.append(duration)
        return len(self.names) - 1

    def after(self, first: int, second: int) -> None:
        """Demand that `second` begins after the end of `first`."""
        self.sequences.append((first, second))

    def store(self, room: int, things: Iterable[Held]) -> None:
        """Demand that the items held at once are no larger than `room` together."""
        self.stores.append((room, tuple(things)))


@dataclass(frozen=True, slots=True)
class Agreement:
    """The start of each task. `bound` is a lower bound on the makespan."""

    status: Status
    makespan: int
    bound: int
    begins: tuple[int, ...] = field(repr=False)


def agree(agenda: Agenda, *, effort: float = EFFORT) -> Agreement:
    """The start times with the least makespan.

    `effort` is the limit of the search, in CP-SAT's deterministic units; past it, the best result
    so far is returned as "feasible".

    Raises InfeasibleError when there is no solution, UndecidedError when the limit was reached
    before the first, InputError when the numbers are too large.
    """
    from ortools.sat.python import cp_model

    target = cp_model.CpModel()
    begins, makespan = _model(target, agenda)
    solver, status = run(target, PROPAGATE, effort)
    if status == cp_model.INFEASIBLE:
        message = f"no begins satisfy the agenda ({len(agenda.names)} tasks): give it more room"
        raise InfeasibleError(message)
    bound = max(round(solver.best_objective_bound), 0)
    if status == cp_model.UNKNOWN:
        raise UndecidedError(effort, bound)
    values = tuple(int(solver.value(begin)) for begin in begins)
    last_end = int(solver.value(makespan))
    if status == cp_model.OPTIMAL:
        return Agreement("optimal", last_end, last_end, values)
    return Agreement("feasible", last_end, min(bound, last_end), values)


def _model(
    target: cp_model.CpModel, agenda: Agenda
) -> tuple[list[cp_model.IntVar], cp_model.IntVar]:
    """The variables of CP-SAT: the start of each task, and the makespan."""
    begins = [
        target.new_int_var(0, max(agenda.horizon - duration, 0), name)
        for name, duration in zip(agenda.names, agenda.durations, strict=True)
    ]
    spans = [
        target.new_fixed_size_interval_var(begin, duration, name)
        for begin, duration, name in zip(begins, agenda.durations, agenda.names, strict=True)
    ]
    makespan = target.new_int_var(0, agenda.horizon, "makespan")
    for begin, duration in zip(begins, agenda.durations, strict=True):
        target.add(begin + duration <= makespan)
    for first, second in agenda.sequences:
        target.add(begins[first] + agenda.durations[first] <= begins[second])
    for tasks in agenda.machines:
        target.add_no_overlap([spans[k] for k in tasks])
    for room, things in agenda.stores:
        _store(target, agenda, begins, room, things)
    target.minimize(makespan)
    for task, hint in agenda.hints.items():
        target.add_hint(begins[task], hint)
    return begins, makespan


def _store(
    target: cp_model.CpModel,
    agenda: Agenda,
    begins: Sequence[cp_model.IntVar],
    room: int,
    things: Sequence[Held],
) -> None:
    """The items held at once are no larger than the capacity."""
    spans = []
    for taken, release, _ in things:
        end = begins[release] + agenda.durations[release]
        size = target.new_int_var(0, agenda.horizon, "")
        spans.append(target.new_interval_var(begins[taken], size, end, ""))
    target.add_cumulative(spans, [size for _, _, size in things], room)
