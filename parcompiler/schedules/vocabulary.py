"""Orders in which all ranks also compute the head: S, NORMALIZE and T of every micro-batch.

The rows of the head are on all ranks. So between the forward and the backward of a micro-batch on
the last stage every rank has a share of work, and there are barriers: x goes to all ranks, they
exchange numbers of the softmax, the gradient of x comes back. Each barrier gets a whole interval
(2411.05288): on every rank the backwards come k micro-batches later, so that k more are in flight;
S and T fit in between.

    method      k    in the slot of S of x       the last stage's backward of x waits for
    vocab-2     1    T of x - 1                  S on all ranks
    vocab-1     2    T of x - 1                  T on all ranks
    naive       3    NORMALIZE of x - 1, T of x - 2       T
    interlaced  p/2  NORMALIZE and T of x        T; ranks wait for each other in between

>>> from parcompiler.schedules import build
>>> print(spread(build("1f1b", 2, 4), "vocab-2"))
rank 0  F0 F1 S0 F2 T0 S1 B0--- T1 S2 F3 B1--- T2 S3 .  B2--- .  .  B3--- T3
rank 1  .  F0 S0 F1 B0--- T0 S1 F2 B1--- T1 S2 F3 B2--- T2 S3 B3--- T3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from parcompiler.errors import InputError
from parcompiler.instruction import HEAD, Kind
from parcompiler.schedules.action import Action
from parcompiler.schedules.rounds import lengthened, shortened
from parcompiler.schedules.schedule import Schedule
from parcompiler.schedules.vocabulary_interlaced import interlaced
from parcompiler.schedules.vocabulary_one_f_one_b import one_f_one_b
from parcompiler.schedules.vocabulary_walk import METHODS, SlotWalk, slots

# Whole intervals between forward and backward of the last stage: one for each barrier.
INTERVALS = {"vocab-2": 1, "vocab-1": 2, "naive": 3}


@lru_cache(maxsize=64)
def spread(schedule: Schedule, method: str) -> Schedule:
    """The schedule with S, NORMALIZE and T on every rank, its backwards later by k micro-batches.

    All ranks do these in the same order. A schedule with one micro-batch in flight stays so. A
    schedule with such actions is returned unchanged. Raises InputError for an unknown method, and
    for an asynchronous schedule: its weights would be updated between S and T.
    """
    if method not in METHODS:
        message = f"unknown vocabulary method {method!r} (known: {', '.join(METHODS)})"
        raise InputError(message)
    if schedule.asynchronous:
        message = (
            f"the vocabulary cannot be spread under {schedule.name!r}, which updates parameters "
            "between micro-batches: take a synchronous schedule, or vocabulary 'whole'"
        )
        raise InputError(message)
    if is_spread(schedule):
        return schedule
    return replace(schedule, orders=tuple(tuple(order) for order in _orders(schedule, method)))


def intervals(method: str, ranks: int) -> int:
    """k, the number of micro-batches by which backwards come later."""
    return INTERVALS.get(method, -(-ranks // 2))


def is_spread(schedule: Schedule) -> bool:
    """Whether a schedule has actions of the vocabulary."""
    return any(action.kind in HEAD for order in schedule.orders for action in order)


def _orders(schedule: Schedule, method: str) -> Sequence[Sequence[Action]]:
    """The published order where there is one, else that of the walk."""
    ranks, m = schedule.ranks, schedule.microbatches
    if schedule.name == "1f1b" and ranks > 1:
        if method in ("vocab-1", "vocab-2") and m >= ranks + INTERVALS[method]:
            return one_f_one_b(ranks, m, INTERVALS[method])
        if method == "interlaced":
            return interlaced(ranks, m)
    alone = all(schedule.in_flight(j) <= 1 for j in range(len(schedule.placement)))
    k = 0 if alone else intervals(method, ranks)
    delayed = [
        list(delay(order, k * schedule.placement.count(r)))
        for r, order in enumerate(schedule.orders)
    ]
    few, rounds = shortened(delayed)
    if rounds:
        some = slots(method, m - rounds * ranks, together=alone)
        walk = SlotWalk(schedule.placement, few, method, some)
        longer = lengthened(walk.orders(), walk.moments, rounds)
        if longer is not None:
            return longer
    return SlotWalk(schedule.placement, delayed, method, slots(method, m, together=alone)).orders()


def delay(order: Sequence[Action], more: int) -> Iterator[Action]:
    """An order whose backwards have `more` additional forwards before them, as far as there are.

    >>> from parcompiler.schedules import build
    >>> " ".join(map(str, delay(build("1f1b", 2, 4).orders[1], 1)))
    'F0 F1 B0 F2 B1 F3 B2 B3'
    """
    forwards = [action for action in order if action.kind is Kind.FORWARD]
    before = sent = 0
    for action in order:
        if action.kind is Kind.FORWARD:
            before += 1
            continue
        yield from forwards[sent : before + more]
        sent = max(sent, min(before + more, len(forwards)))
        yield action
    yield from forwards[sent:]
