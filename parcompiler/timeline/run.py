"""The engine: when every task of a step begins and ends.

    rank 0  F0 F1 .. .. .. B0 .. B1     [1] a task begins when its rank is free
    0 -> 1  .. x0 x1                    [2] and all that it needs has ended;
    rank 1  .. .. F0 B0 F1 B1           [3] an exchange begins when the last of its tasks has ended
    1 -> 0  .. .. .. .. g0 .. g1            (or so many seconds before: what it sends is there
                                            then) and its lanes are free, beside the compute

A message is an exchange of one task (a gradient that several backwards of a rank add to: of all of
them) on the lane of a directed link; a collective one of a task of each rank, on the lane of its
group. So every moment is the latest of a few earlier ones, and one walk over the orders finds them
all: a rank that needs what has not ended yet is put aside until it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add
from types import MappingProxyType

INFINITY = float("inf")
EXACT = 1e-12  # of a step: what rounding may make of equal sums of seconds
NOTHING: Mapping[int, float] = MappingProxyType({})
START = -1  # stands for the begin of the step, where a task could


@dataclass(frozen=True, slots=True)
class Tasks:
    """Who waits for whom. Numbers below `size` are compute tasks; exchanges have those from it on.

    By task: `needs` are tasks and exchanges that must have ended, `joins` the exchanges that it
    takes part in by its end. By exchange, counted from `size`: how many tasks take part in it
    (`parties`) and the `lanes` that it occupies. Those of no task (`early`) begin with the step.
    """

    size: int
    needs: Sequence[Sequence[int]]
    joins: Sequence[Sequence[int]]
    parties: Sequence[int]
    lanes: Sequence[tuple[int, ...]]
    num_lanes: int
    early: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Moments:
    """When each task and exchange begins and ends, in seconds; infinite for what never does."""

    begins: list[float]
    ends: list[float]

    @property
    def last(self) -> float:
        """The end of all that ends."""
        return max((end for end in self.ends if end < INFINITY), default=0.0)

    def stuck(self, orders: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """The ranks that wait for ever, each with the position in its order that it stops at."""
        stops = (
            (rank, next((k for k, task in enumerate(own) if self.ends[task] == INFINITY), None))
            for rank, own in enumerate(orders)
        )
        return [(rank, k) for rank, k in stops if k is not None]


def run(
    tasks: Tasks,
    orders: Sequence[Sequence[int]],
    seconds: Sequence[float],
    known: Sequence[float] = (),
    before: Mapping[int, float] = NOTHING,
) -> Moments:
    """Run the tasks of each rank in the order given; `seconds` are by task and exchange.

    `known` says when some of them begin already, and is infinite for the others; `before` has the
    seconds by which exchanges of one task may begin before its end.
    """
    size, needs, joins = tasks.size, tasks.needs, tasks.joins
    lanes, lane_free = tasks.lanes, [0.0] * tasks.num_lanes
    missing, latest = list(tasks.parties), [0.0] * len(tasks.parties)
    begins = list(known) or [INFINITY] * len(seconds)
    ends = list(map(add, begins, seconds))
    free, position = [0.0] * len(orders), [0] * len(orders)
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(orders)))
    for exchange in tasks.early:
        own = lanes[exchange - size]
        if begins[exchange] == INFINITY:
            begins[exchange] = begin = max((lane_free[lane] for lane in own), default=0.0)
            ends[exchange] = begin + seconds[exchange]
        for lane in own:
            lane_free[lane] = ends[exchange]
    while ready:
        rank = ready.pop()
        order, now = orders[rank], free[rank]
        for k in range(position[rank], len(order)):
            task = order[k]
            if ends[task] == INFINITY:
                begin = now
                for need in needs[task]:
                    if ends[need] > begin:
                        begin = ends[need]
                        if begin == INFINITY:
                            waiting.setdefault(need, []).append(rank)
                            break
                if begin == INFINITY:
                    position[rank] = k
                    break
                begins[task] = begin
                ends[task] = begin + seconds[task]
            now = ends[task]
            for exchange in joins[task]:
                x = exchange - size
                if missing[x] > 1:
                    missing[x] -= 1
                    latest[x] = max(latest[x], now)
                    continue
                if ends[exchange] == INFINITY:
                    begin = now if now > latest[x] else latest[x]
                    if exchange in before:
                        begin -= before[exchange]
                    for lane in lanes[x]:
                        if lane_free[lane] > begin:
                            begin = lane_free[lane]
                    begins[exchange] = begin
                    ends[exchange] = begin + seconds[exchange]
                for lane in lanes[x]:
                    lane_free[lane] = ends[exchange]
                if exchange in waiting:
                    ready += waiting.pop(exchange)
        else:
            position[rank] = len(order)
        free[rank] = now
    return Moments(begins, ends)
