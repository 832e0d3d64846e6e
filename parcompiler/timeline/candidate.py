"""Time and memory of an order of compute before it is lowered, equal to those of the simulator.

The tasks of a candidate are those of the instruction lists that lowering would write; they are run
with its seconds and bytes. They depend only on the order, so they are made once for all costs.

>>> from parcompiler.schedules import build
>>> costs = [StageCost(forward=1.0, backward=2.0, resident=100, saved=10)] * 2
>>> step = timing(build("1f1b", 2, 2), costs, [Message(0, (1,), 1.0, gradient=1.0, nbytes=4)])
>>> step.step_time, step.peak_memory
(11.0, (128, 118))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import starmap
from typing import NamedTuple

import numpy as np

from parcompiler.errors import InputError, PlanError
from parcompiler.instruction import COMPUTE, EMBEDDING, FINAL, HEAD, Kind
from parcompiler.schedules.action import Action, Orders
from parcompiler.schedules.rounds import rounds_to_spare
from parcompiler.schedules.schedule import Schedule
from parcompiler.timeline.collectives import KIND_OF, Collective, SharedLayers
from parcompiler.timeline.costs import Message, StageCost, VocabularyCost
from parcompiler.timeline.embeddings import whole_walk
from parcompiler.timeline.memory import MemoryUse
from parcompiler.timeline.order import OrderTasks, OrderWalk, Send, StageLink
from parcompiler.timeline.run import INFINITY, Moments
from parcompiler.timeline.steady import StepPart


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a step, and peak bytes of each rank."""

    step_time: float
    peak_memory: tuple[int, ...]


def timing(
    schedule: Schedule,
    costs: Sequence[StageCost],
    messages: Sequence[Message],
    vocabulary: VocabularyCost | None = None,
) -> Timing:
    """The step of a schedule whose stage j costs `costs[j]`, as `simulate` would time it.

    Messages are in the order in which a stage sends those of one micro-batch. `vocabulary` is the
    cost of the layers that all ranks share, S and T of the schedule among them. Raises PlanError
    when ranks wait for each other, InputError when the costs do not fit the stages.
    """
    timed = timed_order(schedule, costs, messages, vocabulary)
    moments = timed.run()
    return Timing(moments.last, timed.peaks(moments))


class StepEdges(NamedTuple):
    """Passes of a rank: for each stage the second at which its first forward begins, and the passes
    that make gradients of parameters, each with its seconds from its end to that of the step. Where
    an order repeats itself, these are of the last micro-batches."""

    begins: Mapping[int, float]
    finals: Sequence[tuple[Action, float]]


Schedules = Callable[[int], Schedule]  # number of micro-batches -> schedule


def timing_of_many(
    at: Schedules,
    microbatches: int,
    costs: Sequence[StageCost],
    messages: Sequence[Message],
    vocabulary: VocabularyCost | None = None,
) -> Timing:
    """`timing` of `at(microbatches)`, faster where the order repeats itself. The peaks are those of
    the parts that were run."""
    step, timed, parts = _run_of_many(at, microbatches, costs, messages, vocabulary)
    most = zip(*starmap(timed.peaks, parts), strict=True)
    return Timing(step, tuple(map(max, most)))


def step_time(
    at: Schedules,
    microbatches: int,
    costs: Sequence[StageCost],
    messages: Sequence[Message],
    vocabulary: VocabularyCost | None = None,
) -> float:
    """The seconds of `timing_of_many` alone, which is faster."""
    return _run_of_many(at, microbatches, costs, messages, vocabulary)[0]


def edges_of_many(
    at: Schedules,
    microbatches: int,
    costs: Sequence[StageCost],
    messages: Sequence[Message],
    vocabulary: VocabularyCost | None = None,
) -> list[StepEdges]:
    """The passes of each rank at the edges of the step of `timing_of_many`."""
    _, timed, parts = _run_of_many(at, microbatches, costs, messages, vocabulary)
    begins, ends, last = parts[0].moments.begins, parts[-1].moments.ends, parts[-1].moments.last
    edges = []
    for actions, codes in zip(timed.walk.actions, timed.walk.codes, strict=True):
        pairs = [*zip(actions, codes, strict=True)]
        forwards = [(one.stage, begins[code]) for one, code in pairs if one.kind is Kind.FORWARD]
        finals = [(one, last - ends[code]) for one, code in pairs if one.kind in FINAL]
        edges.append(StepEdges(dict(reversed(forwards)), finals))
    return edges


def _run_of_many(
    at: Schedules,
    microbatches: int,
    costs: Sequence[StageCost],
    messages: Sequence[Message],
    vocabulary: VocabularyCost | None,
) -> tuple[float, TimedOrder, list[StepPart]]:
    """Seconds of the step of many micro-batches, the order that was run, and its parts."""
    few = _fewer_microbatches(at, microbatches)
    if few is not None:
        timed = timed_order(at(few), costs, messages, vocabulary)
        if (result := timed.run_many(microbatches)) is not None:
            return result[0], timed, result[1]
    timed = timed_order(at(microbatches), costs, messages, vocabulary)
    moments = timed.run()
    return moments.last, timed, [StepPart(moments, 0.0, INFINITY)]


def _fewer_microbatches(at: Schedules, microbatches: int) -> int | None:
    """A smaller number of micro-batches from which the step of `microbatches` follows, if any."""
    ranks = at(1).ranks
    rounds = rounds_to_spare(ranks, microbatches)
    return microbatches - rounds * ranks if rounds else None


@dataclass(frozen=True)
class TimedOrder:
    """An order of compute with its costs."""

    walk: OrderWalk
    costs: Sequence[StageCost]
    messages: Sequence[Message]
    vocabulary: VocabularyCost

    def run(self) -> Moments:
        """Start and end of every task and exchange."""
        return self.walk.events.run(self.seconds)

    def run_many(self, microbatches: int) -> tuple[float, list[StepPart]] | None:
        """The step with more micro-batches: see `RepeatingOrder.run_many`."""
        order = self.walk.repeating
        return order.run_many(self.seconds, (microbatches - order.microbatches) // order.period)

    @cached_property
    def holding(self) -> MemoryUse:
        """The memory use of the order."""
        return self.walk.memory(
            frozenset(j for j, cost in enumerate(self.costs) if not cost.trained)
        )

    @cached_property
    def seconds(self) -> list[float]:
        """Seconds by task and exchange."""
        shared, lookups = self.vocabulary, max(1, len(self.vocabulary.users))
        of_stages = [{kind: cost.seconds(kind) for kind in COMPUTE} for cost in self.costs]
        of_shared = {kind: shared.seconds(kind) for kind in HEAD}
        of_shared |= {kind: shared.seconds(kind) / lookups for kind in EMBEDDING}

        def collective(name: str) -> float:
            kind, embedded = KIND_OF.get(name, Kind.EXCHANGE), name.startswith("e")
            return shared.collective(kind, embedded=embedded) / (lookups if embedded else 1)

        tasks = self.walk.pipeline
        seconds = tasks.seconds([0.0] * tasks.classes, pairs_of(self.messages), collective)
        each = np.array(seconds)
        for (kind, stage), codes in self.walk.codes_of.items():
            each[codes] = of_stages[stage][kind] if kind in COMPUTE else of_shared[kind]
        as_list: list[float] = each.tolist()
        return as_list

    def peaks(self, moments: Moments, begin: float = 0.0, end: float = INFINITY) -> tuple[int, ...]:
        """Peak bytes of each rank between two moments."""
        lookups = max(1, len(self.vocabulary.users))
        embedded, x = self.vocabulary.embedded_bytes // lookups, self.vocabulary.x_bytes

        def size(exchange: Send | Collective) -> int:
            if isinstance(exchange, Send):
                return self.messages[exchange.number].nbytes
            return embedded if exchange.what.startswith("e") else x

        placement = self.walk.pipeline.placement
        held = self.holding.held(moments, placement, self.costs, self.vocabulary, size)
        return tuple(memory.most(begin, end) for memory in held)


def timed_order(
    schedule: Schedule,
    costs: Sequence[StageCost],
    messages: Sequence[Message],
    vocabulary: VocabularyCost | None = None,
) -> TimedOrder:
    """A schedule with these costs. Raises PlanError if ranks deadlock."""
    placement, orders = schedule.placement, schedule.orders
    _check(placement, costs, messages)
    has_head = any(action.kind in HEAD for order in orders for action in order)
    if vocabulary is None and has_head:
        message = "a schedule in which all ranks share the head needs its cost (no vocabulary=...)"
        raise InputError(message)
    layers = None
    if vocabulary is not None:
        source = vocabulary.source % len(placement) if has_head else None
        layers = SharedLayers(vocabulary.method, vocabulary.users, source)
    walk = _walk(placement, orders, links_of(messages), layers)
    return TimedOrder(walk, costs, messages, vocabulary or VocabularyCost())


def order_peaks(
    tasks: OrderTasks,
    orders: Orders,
    costs: Sequence[StageCost],
    messages: Sequence[Message],
) -> tuple[int, ...]:
    """The peaks of `timing` alone, which is faster, for orders that end; without shared layers."""
    timed = TimedOrder(OrderWalk(tasks, orders), costs, messages, VocabularyCost())
    return timed.peaks(timed.run())


def pairs_of(messages: Sequence[Message]) -> list[tuple[float, float]]:
    """Seconds of each message and of its gradient."""
    return [(message.seconds, message.gradient or 0.0) for message in messages]


def links_of(messages: Sequence[Message]) -> tuple[StageLink, ...]:
    """The links between stages, without costs."""
    return tuple(StageLink(x.source, x.targets, x.gradient is not None) for x in messages)


@lru_cache(maxsize=32)
def _tasks(
    placement: tuple[int, ...], links: tuple[StageLink, ...], microbatches: int
) -> OrderTasks:
    """The dependencies, which hold for any order. Cached."""
    return OrderTasks(placement, links, microbatches)


@lru_cache(maxsize=64)
def _walk(
    placement: tuple[int, ...],
    orders: Orders,
    links: tuple[StageLink, ...],
    layers: SharedLayers | None,
) -> OrderWalk:
    """A walk through an order, for any seconds. Cached. Raises PlanError if it never ends."""
    if layers is None:
        microbatches = 1 + max(action.microbatch for order in orders for action in order)
        walk = OrderWalk(_tasks(placement, links, microbatches), orders)
    else:
        walk = whole_walk(placement, orders, links, layers)
    _check_end(orders, walk.stuck)
    return walk


def _check(
    placement: Sequence[int], costs: Sequence[StageCost], messages: Sequence[Message]
) -> None:
    """Raise InputError for costs and messages that do not match the stages."""
    stages = len(placement)
    if len(costs) != stages:
        message = f"every stage needs a cost ({stages} stages, {len(costs)} costs)"
        raise InputError(message)
    for each in messages:
        wrong = [j for j in (each.source, *each.targets) if not 0 <= j < stages]
        if wrong or each.source in each.targets:
            message = (
                f"a message goes from one stage to others (from {each.source} to {each.targets}, "
                f"{stages} stages)"
            )
            raise InputError(message)


def _check_end(orders: Orders, stuck: Sequence[tuple[int, int]]) -> None:
    """Raise PlanError, naming the actions at which ranks deadlock, if any."""
    if stuck:
        first = f"the schedule never ends: {len(stuck)} of its {len(orders)} ranks wait"
        where = (f"  * rank {rank} at {orders[rank][k].cell}" for rank, k in stuck)
        message = "\n".join([f"{first} (check the order of these actions)", *where])
        raise PlanError(message)
