"""Lower bound on the slowest rank's time: a linear programme in which blocks are cut at will.

Given       n[k]            blocks of kind k; t[k], b[k], s[k] seconds, resident bytes and bytes
                            saved per micro-batch of one, and t'[k], b'[k], s'[k] when it runs twice
            J(r), c[j]      the stages of rank r; micro-batches in flight on each when it holds most
            L[r]            memory of rank r
Decide      x[k,j] >= 0     number of blocks of kind k on stage j that run once, a fraction
            z[k,j] >= 0     number of those that run twice
Minimize    T
Subject to  all is somewhere    sum(x[k,j] + z[k,j] over j) = n[k]
            no stage is empty   sum(x[k,j] + z[k,j] over k) >= 1
            T is the slowest    sum(t x + t' z over J(r)) <= T
            memory suffices     sum((b + c s) x + (b' + c s') z over J(r)) <= L[r]

Order, messages and shared tensors are left out, so that T is a lower bound for `divide`. Ranks that
compute and hold alike can each have the mean of their parts, and so can stages of a rank on which
as many micro-batches are in flight: they share variables, which count the blocks of all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from parcompiler.errors import InfeasibleError
from parcompiler.passes.divide.data import Load
from parcompiler.passes.divide.task import DivisionTask
from parcompiler.solver import SolverModel, Term, UndecidedError, Variable, solve

TOLERANCE = 1e-6  # relative, of the solver


class _Way(NamedTuple):
    """One way to run a block (once or twice): seconds on each rank, or one number for all."""

    seconds: tuple[float, ...]
    resident: int
    saved: int

    def on(self, rank: int) -> float:
        """Seconds on a rank."""
        return self.seconds[rank if len(self.seconds) > 1 else 0]


class _Rank(NamedTuple):
    """A kind of rank: the first of them (0 where all compute alike), bytes of memory, and the
    number of stages by the micro-batches in flight on them when the rank holds most."""

    first: int
    limit: float
    stages: Counter[int]


def least_slowest_rank(task: DivisionTask) -> float:
    """Lower bound on the seconds of a micro-batch on the slowest rank; infinite if nothing fits.

    >>> heavy, twice = Load(1.0, resident=0, saved=4), Load(1.5, resident=0, saved=1)
    >>> given = [heavy] * 4, [], (0, 1), 4, [[(2,)], [(1,)]], [8.0, 8.0]
    >>> least_slowest_rank(DivisionTask(*given))
    inf
    >>> round(least_slowest_rank(DivisionTask(*given, [twice] * 4)), 6)
    2.333333
    """
    total = math.fsum(load.seconds for load in task.loads)
    if total <= 0:
        return 0.0
    if task.is_uniform and _even_parts_fit(task):
        return total / task.ranks
    if _is_too_large(task):
        return math.inf
    model = SolverModel()
    slowest = model.continuous("T")
    alike = _alike(task)
    parts = _divide(model, task, [n * count for n, rank in alike for count in rank.stages.values()])
    for number, rank in alike:
        work: list[Term] = [(-number, slowest)]
        memory: list[Term] = []
        for in_flight in rank.stages:
            for way, part in next(parts):
                work.append((way.on(rank.first) / total * task.ranks, part))
                memory.append(((way.resident + in_flight * way.saved) / rank.limit, part))
        model.constrain(work, high=0)
        model.constrain(memory, high=number)
    model.minimize([(1, slowest)])
    try:
        return solve(model).objective * total / task.ranks
    except InfeasibleError:
        return math.inf
    except UndecidedError:  # the solver's rounding: an even share is a bound as well
        return total / task.ranks


def _even_parts_fit(task: DivisionTask) -> bool:
    """Whether every stage can have an equal part of every block, which is the optimum."""
    resident = sum(load.resident for load in task.loads) / task.ranks
    saved = sum(load.saved for load in task.loads) / task.stages
    fullest = (max(map(sum, counts)) for counts in task.held)
    pairs = zip(fullest, task.limits, strict=True)
    return all(resident + in_flight * saved <= limit for in_flight, limit in pairs)


def _is_too_large(task: DivisionTask) -> bool:
    """Whether the blocks exceed the memory of all ranks even if each is where it takes least: tells
    most infeasible programmes without the solver."""
    places = {(rank.limit, in_flight) for _, rank in _alike(task) for in_flight in rank.stages}
    least = sum(
        number * min((w.resident + c * w.saved) / limit for w in ways for limit, c in places)
        for (_, ways), number in _kinds(task).items()
    )
    return least > (1 + TOLERANCE) * task.ranks


def _kinds(task: DivisionTask) -> Counter[tuple[str, tuple[_Way, ...]]]:
    """The number of blocks of each kind. A kind is a letter for each way to run (x, z), and those
    ways."""
    pairs = zip(task.loads, task.again or [None] * len(task.loads), strict=True)
    return Counter(("xz", (_way(a), _way(b))) if b else ("x", (_way(a),)) for a, b in pairs)


def _alike(task: DivisionTask) -> list[tuple[int, _Rank]]:
    """The kinds of ranks, each with the number of its ranks."""
    kinds = Counter(
        (limit, tuple(sorted(max(held, key=sum))), 0 if task.is_uniform else rank)
        for rank, (limit, held) in enumerate(zip(task.limits, task.held, strict=True))
    )
    return [(n, _Rank(first, limit, Counter(held))) for (limit, held, first), n in kinds.items()]


def _divide(
    model: SolverModel, task: DivisionTask, stages: Sequence[int]
) -> Iterator[list[tuple[_Way, Variable]]]:
    """Place all blocks on these numbers of alike stages: for each number, every way to run a block
    with the variable that counts such blocks."""
    ways_of: list[list[tuple[_Way, Variable]]] = [[] for _ in stages]
    for k, ((letters, ways), count) in enumerate(_kinds(task).items()):
        parts = []
        for j, choices in enumerate(ways_of):
            for letter, way in zip(letters, ways, strict=True):
                parts.append(model.continuous(f"{letter}[{k},{j}]"))
                choices.append((way, parts[-1]))
        model.constrain([(1, part) for part in parts], count, count)
    for number, choices in zip(stages, ways_of, strict=True):
        model.constrain([(1, part) for _, part in choices], low=number)
    return iter(ways_of)


def _way(load: Load) -> _Way:
    return _Way(load.by_rank or (load.seconds,), load.resident, load.saved)
