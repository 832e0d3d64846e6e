"""Loops of orders: rounds that differ only in their micro-batches, so that few stand for many.

many   F F F B │ F B │ F B │ F B │ F B │ B B B      a round has a micro-batch for each rank
few    F F F B │ F B │ F B │ B B B
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import sub
from typing import NamedTuple, TypeVar

from parcompiler.instruction import Kind
from parcompiler.schedules.action import Action

Line = TypeVar("Line")

ROUNDS = 6  # rounds in which a steady state is looked for
MANY = 2  # how many times more micro-batches are worth the search


class RankLoop(NamedTuple):
    """Start and end of the loop in the order of a rank, and the length of a round, in actions."""

    begin: int
    end: int
    length: int


def loops_of(orders: Sequence[Sequence[int]], m: int, period: int) -> list[RankLoop] | None:
    """The loop of each rank in orders of tasks row · m + i; None if one has none."""
    loops = []
    for order in orders:
        length = sum(m // 2 <= task % m < m // 2 + period for task in order)
        low = high = (len(order) - length) // 2
        while low > 0 and order[low - 1 + length] == order[low - 1] + period:
            low -= 1
        while high + length < len(order) and order[high + length] == order[high] + period:
            high += 1
        if not length or high - low < length:
            return None
        loops.append(RankLoop(low, high + length, length))
    return loops


def loops_of_actions(orders: Sequence[Sequence[Action]]) -> list[RankLoop] | None:
    """The loop of each rank; None if one has none."""
    m = 1 + max((action.microbatch for order in orders for action in order), default=-1)
    rows: dict[tuple[Kind, int], int] = {}
    codes = [[rows.setdefault((kind, j), len(rows)) * m + i for kind, j, i in o] for o in orders]
    return loops_of(codes, m, len(orders))


def rounds_to_spare(ranks: int, microbatches: int) -> int:
    """The number of rounds beyond those in which a steady state is looked for; 0 if it is small.

    >>> rounds_to_spare(4, 48), rounds_to_spare(4, 46)
    (6, 0)
    """
    more = microbatches // ranks - ROUNDS
    return more if more > 0 and MANY * (microbatches - more * ranks) <= microbatches else 0


def shortened(orders: Sequence[Sequence[Action]]) -> tuple[Sequence[Sequence[Action]], int]:
    """The orders without the rounds that they can spare, and the number of these rounds."""
    m = 1 + max((action.microbatch for row in orders for action in row), default=-1)
    rounds = rounds_to_spare(len(orders), m)
    loops = loops_of_actions(orders) if rounds else None
    if loops is None:
        return orders, 0
    rounds = min(rounds, *((loop.end - loop.begin) // loop.length - ROUNDS for loop in loops))
    if rounds <= 0:
        return orders, 0
    return [
        [*order[: end - rounds * length], *_later(order[end:], -rounds * len(orders))]
        for order, (_, end, length) in zip(orders, loops, strict=True)
    ], rounds


def lengthened(
    orders: Sequence[Sequence[Action]], moments: Sequence[Sequence[int]], rounds: int
) -> list[list[Action]] | None:
    """The orders of a walk with `rounds` more rounds. `moments` are the starts of the actions; None
    unless, in all loops, two rounds in a row shift by the same time throughout."""
    loops = loops_of_actions(orders)
    if loops is None:
        return None
    end = min(times[loop.end - 1] for times, loop in zip(moments, loops, strict=True))
    shifts = set[int]()
    for times, (begin, _, length) in zip(moments, loops, strict=True):
        last = bisect_left(times, end)
        first = last - 2 * length
        if first - length < begin:
            return None
        shifts.update(map(sub, times[first:last], times[first - length : last - length]))
    if len(shifts) > 1:
        return None
    q, longer = len(orders), list[list[Action]]()
    for order, (_, stop, length) in zip(orders, loops, strict=True):
        parts = order[: stop - length], order[stop - length : stop], order[stop:]
        longer.append(list(repeated(parts, rounds, q, _later)))
    return longer


def repeated(
    parts: Sequence[Sequence[Line]],
    rounds: int,
    period: int,
    later: Callable[[Iterable[Line], int], Iterable[Line]],
) -> Iterator[Line]:
    """An order with further rounds: `parts` are what stands before its last round (of `period`
    micro-batches), that round, and what follows; `later` adds to the micro-batches."""
    before, last, behind = parts
    yield from before
    for k in range(rounds + 1):
        yield from later(last, k * period)
    yield from later(behind, rounds * period)


def _later(actions: Iterable[Action], more: int) -> Iterator[Action]:
    """The actions with `more` added to their micro-batches."""
    return (Action(kind, j, i + more) for kind, j, i in actions)
