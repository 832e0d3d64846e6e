"""The engine of the timeline: start and end of every task of a step.

    rank 0  F0 F1 .. .. .. B0 .. B1     [1] a task begins when its rank is free
    0 -> 1  .. x0 x1                    [2] and all that it needs has ended;
    rank 1  .. .. F0 B0 F1 B1           [3] an exchange begins, beside the compute, when its lanes
    1 -> 0  .. .. .. .. g0 .. g1            are free and the last of its tasks has ended (or some
                                            seconds earlier, if its data are final by then)

A message is an exchange of one task, or of all backwards of a rank that add to one gradient, on the
lane of a directed link; a collective is an exchange of one task of each rank, on the lane of its
group. So every moment is the latest of a few earlier ones. A walk over the orders lists the events
behind their causes (`ordered`): a rank that needs an event that is not listed yet waits until it
is. The list serves for any seconds (`EventOrder.run`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

INFINITY = float("inf")
EXACT = 1e-12  # share of a step by which equal sums of seconds may differ through rounding
NOTHING: Mapping[int, float] = MappingProxyType({})
START = -1  # in place of a task: the start of the step


@dataclass(frozen=True, slots=True)
class Tasks:
    """The dependencies. Numbers below `size` are compute tasks, those from `size` on exchanges.

    By task: `needs` are tasks and exchanges that must have ended before it, `joins` the exchanges
    that wait for its end. By exchange, counted from `size`: the number of tasks that it waits for
    (`parties`) and the `lanes` that it occupies. Exchanges without tasks (`early`) begin with the
    step.
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
    """Start and end of each task and exchange, in seconds; infinite for those that never begin."""

    begins: list[float]
    ends: list[float]

    @property
    def last(self) -> float:
        """The latest finite end."""
        last = max(self.ends, default=0.0)
        return last if last < INFINITY else max((x for x in self.ends if x < INFINITY), default=0.0)


@dataclass(frozen=True, slots=True)
class EventOrder:
    """Tasks and exchanges (events) in an order in which each follows its two causes, `first` and
    `second`: it begins when both have ended. They may be equal, or START.

    An event with more causes waits for some of them through helpers: events of no seconds, numbered
    after the last exchange. Events that never begin are in no list. An exchange that may begin
    before the end of its tasks has a helper in `arrivals`, which takes negative seconds.
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
        """Start and end of everything; `seconds` are by task and exchange. See `run`."""
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
    """Run the tasks of each rank in the given order; `seconds` are by task and exchange.

    `known` has the start of those for which it is fixed, and is infinite for the others; `before`
    has the seconds by which exchanges may begin before the end of their tasks.
    """
    return ordered(tasks, orders, before.keys()).run(seconds, known, before)


def ordered(
    tasks: Tasks, orders: Sequence[Sequence[int]], apart: Collection[int] = ()
) -> EventOrder:
    """The events of the tasks of each rank in the given order, for any seconds; `apart` are the
    exchanges that may begin before the end of their tasks."""
    needs, joins, lanes = tasks.needs, tasks.joins, tasks.lanes
    size, total = tasks.size, tasks.size + len(tasks.parties)
    events: list[int] = []
    first: list[int] = []
    second: list[int] = []
    done, number = [False] * total, total  # `number` is that of the next helper

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

    before = [START] * tasks.num_lanes  # the last exchange of each lane
    arrivals: dict[int, int] = {}
    missing, makers = list(tasks.parties), dict[int, list[int]]()
    behind, position = [START] * len(orders), [0] * len(orders)
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(orders)))
    for exchange in tasks.early:
        used = lanes[exchange - size]
        add(exchange, [START, *(before[lane] for lane in used)])
        done[exchange] = True
        for lane in used:
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
