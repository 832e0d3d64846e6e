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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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
        last = max(self.ends, default=0.0)
        return last if last < INFINITY else max((x for x in self.ends if x < INFINITY), default=0.0)


@dataclass(frozen=True, slots=True)
class EventOrder:
    """Tasks and exchanges (events) in an order in which each comes behind its causes: it begins
    when both of these have ended, or one of them twice, or the step has begun (START).

    An event of more causes waits for the latest of some by a `helper`: an event of no seconds that
    has the numbers behind the last exchange. What never begins is in no list. The seconds by which
    an exchange may begin before its end are those of the helper that stands for it in `arrivals`.
    """

    size: int
    events: list[int]
    first: list[int]
    second: list[int]
    helpers: int
    arrivals: Mapping[int, int]
    stuck: list[tuple[int, int]]

    def run(
        self,
        seconds: Sequence[float],
        known: Sequence[float] = (),
        before: Mapping[int, float] = NOTHING,
    ) -> Moments:
        """When everything begins and ends; `seconds` are by task and exchange. See `run`."""
        helping = [0.0] * self.helpers
        for exchange, more in before.items():
            helping[self.arrivals[exchange] - self.size] = -more
        taken = [*seconds, *helping]
        begins = [INFINITY] * len(taken)
        ends = [*begins, 0.0]  # the last is START
        if known:
            begins[: self.size] = known
        for event, one, two in zip(self.events, self.first, self.second, strict=True):
            begin = begins[event]
            if begin == INFINITY:
                begin, other = ends[one], ends[two]
                if other > begin:
                    begin = other
                begins[event] = begin
            ends[event] = begin + taken[event]
        return Moments(begins[: self.size], ends[: self.size])


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
    return ordered(tasks, orders, before.keys()).run(seconds, known, before)


def ordered(
    tasks: Tasks, orders: Sequence[Sequence[int]], apart: Collection[int] = ()
) -> EventOrder:
    """The events of the tasks of each rank in the order given, whatever their seconds are; those
    `apart` are exchanges that may begin before the end of their task."""
    needs, joins, lanes = tasks.needs, tasks.joins, tasks.lanes
    size, total = tasks.size, tasks.size + len(tasks.parties)
    events: list[int] = []
    first: list[int] = []
    second: list[int] = []
    done, number = [False] * total, total  # that of the next helper

    def add(event: int, causes: list[int]) -> None:
        nonlocal number
        while len(causes) > 2:
            events.append(number)
            first.append(causes.pop())
            second.append(causes.pop())
            causes.append(number)
            number += 1
        events.append(event)
        first.append(causes[0])
        second.append(causes[-1])

    before = [START] * tasks.num_lanes  # the exchange that each lane had last
    arrivals: dict[int, int] = {}
    missing, makers = list(tasks.parties), dict[int, list[int]]()
    behind, position = [START] * len(orders), [0] * len(orders)
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(orders)))
    for exchange in tasks.early:
        own = lanes[exchange - size]
        add(exchange, [START, *(before[lane] for lane in own)])
        done[exchange] = True
        for lane in own:
            before[lane] = exchange
    while ready:
        rank = ready.pop()
        order, now = orders[rank], behind[rank]
        for k in range(position[rank], len(order)):
            task = order[k]
            causes = needs[task]
            for need in causes:
                if not done[need]:
                    waiting.setdefault(need, []).append(rank)
                    break
            else:
                if len(causes) < 2:
                    events.append(task)
                    first.append(now)
                    second.append(causes[0] if causes else now)
                else:
                    add(task, [now, *causes])
                done[task], now = True, task
                for exchange in joins[task]:
                    x = exchange - size
                    if missing[x] > 1:
                        missing[x] -= 1
                        makers.setdefault(exchange, []).append(task)
                        continue
                    parts = [task, *makers.pop(exchange, ())]
                    if exchange in apart:
                        arrivals[exchange] = number
                        number += 1
                        add(arrivals[exchange], parts)
                        parts = [arrivals[exchange]]
                    add(exchange, [*parts, *(before[lane] for lane in lanes[x])])
                    done[exchange] = True
                    for lane in lanes[x]:
                        before[lane] = exchange
                    if exchange in waiting:
                        ready += waiting.pop(exchange)
                continue
            position[rank] = k
            break
        else:
            position[rank] = len(order)
        behind[rank] = now
    stuck = [(rank, k) for rank, k in enumerate(position) if k < len(orders[rank])]
    return EventOrder(total, events, first, second, number - total, arrivals, stuck)
