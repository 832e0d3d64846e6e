"""The step of many micro-batches from runs of a few: steady states are multiplied, not run.

    rank 0  F F F F B F B F B │ F B F B ...  F B F B │ B B B       [1] every rank has one loop,
    rank 1  F F F B F B F B F │ B F B F ...  B F B F │ B B B           of a period of micro-batches
                       known  │  multiplied          │ run again   [2] a moment in all loops

Every task and exchange has a row with a number for each micro-batch (`OrderTasks`). In the loops,
the moment of micro-batch i in a row is the latest of a few earlier moments, plus seconds: each
round is the same function of the one before (a max-plus linear system: Baccelli et al.,
Synchronization and Linearity, 1992, chapter 3). So once every row has shifted by a pace of its own
for as many micro-batches as that function looks back, it goes on like this until a cause that comes
earlier, but shifts by more, catches up with the one that decides. That number of rounds is
multiplied at [2]; the rest is run again, with these moments as its past. Only rounding is
approximate.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import sub
from typing import NamedTuple

from parcompiler.schedules.rounds import RankLoop, loops_of
from parcompiler.timeline.run import EXACT, INFINITY, EventOrder, Moments, Tasks


class StepPart(NamedTuple):
    """Start and end of tasks and exchanges, valid from `begin` to `end`."""

    moments: Moments
    begin: float
    end: float


@dataclass(frozen=True)
class RepeatingOrder:
    """Tasks of a few micro-batches in an order that should repeat every `period` micro-batches.

    Task and exchange number row · microbatches + i is that of micro-batch i in a row.
    """

    tasks: Tasks
    events: EventOrder
    orders: Sequence[Sequence[int]]
    microbatches: int
    period: int

    def run_many(
        self, seconds: Sequence[float], rounds: int
    ) -> tuple[float, list[StepPart]] | None:
        """Seconds of the step with `rounds` more periods of micro-batches, and the parts that were
        run; None where the order has no loops, or they are too short to go on."""
        if self.loops is None:
            return None
        parts, known, q, begin = [], list[float](), self.period, 0.0
        while True:
            moments = self.events.run(seconds, known)
            if not rounds:
                parts.append(StepPart(moments, begin, INFINITY))
                return moments.last, parts
            end = min(
                moments.begins[order[min(loop.end, len(order) - 1)]]
                for order, loop in zip(self.orders, self.loops, strict=True)
            )
            cut = _Cut(self, moments, end)
            paces = cut.paces()
            if paces is not None and cut.is_even(paces):
                parts.append(StepPart(moments, begin, INFINITY))
                return moments.last + rounds * max(paces), parts
            jump = min(rounds, cut.lasts(paces)) if paces is not None else 0
            moved = min(cut.room(), rounds - jump)
            if jump + moved <= 0:
                return None
            parts.append(StepPart(moments, begin, end))
            known, begin = [INFINITY] * len(seconds), 0.0
            shifts = paces or [0.0] * len(self.rows)
            for pace, (row, stop) in zip(shifts, cut.stops.items(), strict=True):
                first = row + moved * q
                past = [at + jump * pace for at in moments.begins[first : row + stop]]
                known[row : row + len(past)] = past
                begin = max(begin, *past[max(0, len(past) - cut.back - q) :][:1])
            rounds -= jump + moved

    def pace(self, moments: Moments, moment: float) -> float | None:
        """Seconds by which everything from a period before `moment` (in the loops) on comes later
        in an order with one more period; None where that is not known."""
        if self.loops is None:
            return None
        cut = _Cut(self, moments, moment)
        paces = cut.paces()
        return max(paces) if paces is not None and cut.is_even(paces) else None

    @cached_property
    def rows(self) -> list[int]:
        """The first number of every row of tasks and exchanges in use."""
        m = self.microbatches
        joins, needs = self.tasks.joins, self.tasks.needs
        used = {
            x for order in self.orders for task in order for x in (task, *joins[task], *needs[task])
        }
        return sorted({x - x % m for x in used})

    @cached_property
    def loops(self) -> list[RankLoop] | None:
        """The loop of each rank; None if one has none."""
        return loops_of(self.orders, self.microbatches, self.period)

    @cached_property
    def causes(self) -> list[list[tuple[int, int]]]:
        """By rank, pairs (task or exchange, cause that may decide its start), from the last round
        of the loops on."""
        causes = []
        for order, loop in zip(self.orders, self.loops or (), strict=True):
            first = max(1, loop.end - loop.length)
            causes.append(list(self._causes_of(order, max(0, first - loop.length), first)))
        return causes

    def _causes_of(self, order: Sequence[int], begin: int, first: int) -> Iterator[tuple[int, int]]:
        """The causes of one rank from place `first` of its order on, as seen from place `begin`."""
        tasks = self.tasks
        last = {exchange: task for task in order for exchange in tasks.joins[task]}
        lanes: dict[int, int] = {}  # the last exchange of each lane
        for k, task in enumerate(order[begin:], begin):
            if k >= first:
                yield from ((task, cause) for cause in (order[k - 1], *tasks.needs[task]))
            for exchange in tasks.joins[task]:
                if k >= first:
                    yield exchange, task
                if last[exchange] == task:
                    for lane in tasks.lanes[exchange - tasks.size]:
                        if k >= first and lane in lanes:
                            yield exchange, lanes[lane]
                        lanes[lane] = exchange

    @cached_property
    def distances(self) -> dict[tuple[int, int], int]:
        """By pair of rows, the most micro-batches from a cause to what it may decide."""
        m, distances = self.microbatches, dict[tuple[int, int], int]()
        for one, two in chain.from_iterable(self.causes):
            key = one - one % m, two - two % m
            distances[key] = max(distances.get(key, -m), one % m - two % m)
        return distances

    @cached_property
    def round(self) -> dict[int, set[tuple[int, int]]]:
        """The causes in one round: by task or exchange, the row of each cause and the number of
        micro-batches by which it is earlier."""
        m, offsets = self.microbatches, dict[int, set[tuple[int, int]]]()
        for order, loop, pairs in zip(self.orders, self.loops or (), self.causes, strict=True):
            tasks = set(order[loop.end - loop.length : loop.end])
            tasks |= {exchange for task in tasks for exchange in self.tasks.joins[task]}
            for one, two in pairs:
                if one in tasks:
                    offsets.setdefault(one, set()).add((two - two % m, one % m - two % m))
        return offsets


class _Cut:
    """The state at some moment in the loops: what has begun before, and how it goes on."""

    def __init__(self, order: RepeatingOrder, moments: Moments, moment: float) -> None:
        self.order, self.moments, self.rounding = order, moments, EXACT * moments.last
        m, begins = order.microbatches, moments.begins
        self.stops = {row: bisect_left(begins, moment, row, row + m) - row for row in order.rows}
        self.places = [bisect_left(tasks, moment, key=begins.__getitem__) for tasks in order.orders]
        pairs = order.distances.items()
        looked = (most - self.stops[one] + self.stops[two] for (one, two), most in pairs)
        self.back = max(order.period, *looked)  # micro-batches that later tasks look back

    def room(self) -> int:
        """The number of earlier rounds that may be run again."""
        pairs = zip(self.places, self.order.loops or (), strict=True)
        inloops = (place - 1 - loop.begin for place, loop in pairs)
        lengths = (loop.length for loop in self.order.loops or ())
        rounds = [a // b for a, b in zip(inloops, lengths, strict=True)]
        return min(*rounds, (min(self.stops.values()) - self.back) // self.order.period)

    def paces(self) -> list[float] | None:
        """Seconds by which each row shifts in a period; None if one does not shift evenly yet."""
        pairs = zip(self.places, self.order.loops or (), strict=True)
        if any(place < loop.begin + loop.length for place, loop in pairs):
            return None
        begins, q, paces = self.moments.begins, self.order.period, []
        for row, stop in self.stops.items():
            low, high = row + stop - self.back, row + stop
            if low - q < row:
                return None
            pace = begins[low] - begins[low - q]
            paces.append(pace)
            shifts = map(sub, begins[low:high], begins[low - q : high - q])
            if any(abs(shift - pace) > self.rounding for shift in shifts):
                return None
        return paces

    def is_even(self, paces: Sequence[float]) -> bool:
        """Whether all rows have one pace, which then lasts for ever."""
        return max(paces) - min(paces) <= self.rounding

    def lasts(self, paces: Sequence[float]) -> int:
        """The number of periods for which these paces last: until another cause decides."""
        m, q = self.order.microbatches, self.order.period
        rounds = math.inf
        pace = dict(zip(self.stops, paces, strict=True))
        for one, causes in self.order.round.items():
            row = one - one % m
            i = self.stops[row] - q + (one % m - self.stops[row]) % q
            begin, is_decided = self.moments.begins[row + i], False
            for other, distance in causes:
                slack = begin - self.moments.ends[other + i - distance]
                faster = pace[other] - pace[row]
                if faster > self.rounding:
                    rounds = min(rounds, max(0.0, slack / faster))
                is_decided |= slack <= self.rounding and abs(faster) <= self.rounding
            if not is_decided:
                return 0
        return int(rounds) if rounds < math.inf else sys.maxsize
