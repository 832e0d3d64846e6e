"""The cheapest blocks of a rank to run twice so that all of them fit: exact.

Given       kinds of blocks that are alike in time and bytes; c[t] blocks of kind t on the rank
            d[t]        units of time to run one again
            s[t]        bytes that this frees; m[t], m'[t] bytes that one takes while it computes,
                        running once or twice
            over        bytes by which the rank is over its limit, without m and m'
Decide      n[t]        number of blocks of kind t that run twice
Minimize    sum(d[t] n[t]), then sum(n[t])
Subject to  over - sum(s[t] n[t]) + a <= 0
            a >= m[t] if n[t] < c[t],  a >= m'[t] if n[t] > 0

There are few numbers of blocks that differ in d or s, as layers repeat: all are tried, the cheapest
first, for each value of a. Among blocks that differ in m and m' alone, as gradients that wait for
their bucket do under ZeRO 2, any do that a is enough for. Where there are many numbers, the solver
is asked. A rank with several stages has one such constraint for each vector of micro-batches in
flight.

>>> layers = BlockKind(4, again=3, freed=(10,), moment=2, moment_again=5)
>>> [cheapest([layers], [over]) for over in (-2, 1, 36)]
[Choice(seconds=0, counts=(0,)), Choice(seconds=3, counts=(1,)), None]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parcompiler.errors import InfeasibleError
from parcompiler.passes.divide.data import blocks_on, received_on, sizes
from parcompiler.passes.divide.task import DivisionTask
from parcompiler.solver import SolverModel, Variable, solve

CHOICES = 2**16  # most numbers of blocks that are tried


class BlockKind(NamedTuple):
    """Equal `blocks` of a rank, by number; `again` are the units to run one a second time, or None.

    `freed` are the bytes that this frees, for each vector of micro-batches in flight.
    """

    blocks: int
    again: int | None
    freed: tuple[int, ...]
    moment: int
    moment_again: int


class Choice(NamedTuple):
    """How many blocks of each kind run twice, and the units of time that takes."""

    seconds: int
    counts: tuple[int, ...]


def cheapest(kinds: Sequence[BlockKind], over: Sequence[int]) -> Choice | None:
    """The cheapest choice that fits; of equals one with the fewest blocks. None if none fits."""
    most = [
        sum(kind.blocks * max(0, kind.freed[v]) for kind in kinds if kind.again is not None)
        for v in range(len(over))
    ]
    if any(size > freed for size, freed in zip(over, most, strict=True)):
        return None
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for t, kind in enumerate(kinds):
        if kind.again is not None:
            groups.setdefault((kind.again, kind.freed), []).append(t)
    ends = tuple(1 + sum(kinds[t].blocks for t in members) for members in groups.values())
    if math.prod(ends) > CHOICES:
        return _solved(kinds, over)
    counts, seconds = _ranked(ends, tuple(again for again, _ in groups))
    freed = np.array([freed for _, freed in groups], dtype=np.int64).reshape(len(ends), len(over))
    room = (counts @ freed - np.array(over)).min(axis=1)
    least = max((kind.moment for kind in kinds if kind.again is None), default=0)
    best: int = len(counts)
    taken: tuple[int, ...] = ()
    for a in sorted({moment for kind in kinds for moment in (kind.moment, kind.moment_again)}):
        if a < least:
            continue
        fitting = np.flatnonzero(room[:best] >= a)
        if not fitting.size:
            break  # a higher one leaves less room
        must = [[t for t in members if kinds[t].moment > a] for members in groups.values()]
        able = [[t for t in members if kinds[t].moment_again <= a] for members in groups.values()]
        if any(not {*forced} <= {*may} for forced, may in zip(must, able, strict=True)):
            continue
        low, high = ([sum(kinds[t].blocks for t in members) for members in x] for x in (must, able))
        choices = fitting[((counts[fitting] >= low) & (counts[fitting] <= high)).all(axis=1)]
        if choices.size:
            best = int(choices[0])
            taken = _spread(kinds, counts[best].tolist(), must, able)
    return Choice(int(seconds[best]), taken) if best < len(counts) else None


@lru_cache(maxsize=16)  # layers repeat
def _ranked(
    ends: tuple[int, ...], again: tuple[int, ...]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All numbers of blocks below `ends`, one choice in a row, and the seconds of each: the
    cheapest first, of equals the fewest blocks, then in lexicographic order."""
    counts = np.indices(ends).reshape(len(ends), math.prod(ends)).T
    seconds = counts @ np.array(again, dtype=np.int64)
    ranking = np.lexsort((counts.sum(axis=1), seconds))
    return counts[ranking], seconds[ranking]


def _spread(
    kinds: Sequence[BlockKind],
    counts: Sequence[int],
    must: Sequence[Sequence[int]],
    able: Sequence[Sequence[int]],
) -> tuple[int, ...]:
    """The number of blocks of each kind that run twice, from the number of each group: first of the
    kinds that must, then of the last that are able to."""
    taken = [0] * len(kinds)
    for left, first, others in zip(counts, must, able, strict=True):
        for t in dict.fromkeys((*first, *reversed(others))):
            taken[t] = min(left, kinds[t].blocks)
            left -= taken[t]
    return tuple(taken)


def _solved(kinds: Sequence[BlockKind], over: Sequence[int]) -> Choice | None:
    """`cheapest` by the solver."""
    model = SolverModel()
    most = max(max(kind.moment, kind.moment_again) for kind in kinds)
    a = model.integer("a", 0, most)
    n: list[Variable] = []
    for t, kind in enumerate(kinds):
        able = kind.again is not None
        n.append(model.integer(f"n[{t}]", 0, kind.blocks if able else 0))
        some, every = model.binary(f"some[{t}]"), model.binary(f"every[{t}]")
        # n > 0 only with `some`; `every` only when n is c.
        model.constrain([(kind.blocks, some), (-1, n[t])], low=0)
        model.constrain([(1, n[t]), (-kind.blocks, every)], low=0)
        # There is room for a block that runs twice, and for one that does not.
        model.constrain([(1, a), (-kind.moment_again, some)], low=0)
        model.constrain([(1, a), (kind.moment, every)], low=kind.moment)
    for v, size in enumerate(over):
        freed = [(kind.freed[v], n[t]) for t, kind in enumerate(kinds)]
        model.constrain([*freed, (-1, a)], low=size)
    weight = 1 + sum(kind.blocks for kind in kinds)
    model.minimize([(weight * (k.again or 0) + 1, n[t]) for t, k in enumerate(kinds)])
    try:
        solution = solve(model, relax=True)
    except InfeasibleError:
        return None
    counts = tuple(int(solution[variable]) for variable in n)
    return Choice(sum(n * (k.again or 0) for n, k in zip(counts, kinds, strict=True)), counts)


def cheapest_of(
    task: DivisionTask, rank: int, groups: Sequence[tuple[int, int, Sequence[int]]], over: list[int]
) -> Choice | None:
    """`cheapest` for blocks of a task on a rank. `groups` has a block of each kind, the number of
    such blocks, and the micro-batches in flight on their stage in each vector."""
    kinds = []
    for i, count, in_flight in groups:
        load, twice = task.loads[i], task.again[i] if task.again else None
        if twice is None:
            kinds.append(BlockKind(count, None, (0,) * len(in_flight), load.moment, 0))
            continue
        resident, saved = load.resident - twice.resident, load.saved - twice.saved
        freed = tuple(resident + k * saved for k in in_flight)
        kinds.append(BlockKind(count, task.extra[rank][i], freed, load.moment, twice.moment))
    return cheapest(kinds, over)


def spared(task: DivisionTask, stage_of: Sequence[int]) -> frozenset[int] | None:
    """The cheapest blocks to run twice on these stages; None when nothing fits.

    Ranks are independent of each other then. Of blocks of one kind the first ones are taken.
    """
    blocks = blocks_on(stage_of, task.stages)
    received = received_on(task.flows, stage_of, task.placement)
    chosen: set[int] = set()
    for rank, stages in enumerate(task.on):
        alike: dict[tuple[int, int], list[int]] = {}  # blocks by kind and place of their stage
        for i, place in sorted((i, place) for place, j in enumerate(stages) for i in blocks[j]):
            alike.setdefault((task.kind_of[i], place), []).append(i)
        vectors = task.held[rank]
        groups = [
            (kind, len(members), [vector[place] for vector in vectors])
            for (kind, place), members in alike.items()
        ]
        blocks_of, values = [blocks[j] for j in stages], [received[j] for j in stages]
        besides = task.room[rank] + max(task.loads[i].moment for b in blocks_of for i in b)
        over = [size - besides for size in sizes(task.loads, blocks_of, values, vectors)]
        choice = cheapest_of(task, rank, groups, over)
        if choice is None:
            return None
        for count, members in zip(choice.counts, alike.values(), strict=True):
            chosen.update(members[:count])
    return frozenset(chosen)
