"""What an order of compute takes before anything is lowered: its step as the simulator says it.

A candidate is written as the instruction lists that lowering would write, and these are run with
its seconds and bytes. The lists depend on the order alone, so they are written once for all costs.

>>> from parcompiler.schedules import build
>>> costs = [StageCost(forward=1.0, backward=2.0, resident=100, saved=10)] * 2
>>> step = timing(build("1f1b", 2, 2), costs, [Message(0, (1,), 1.0, gradient=1.0, nbytes=4)])
>>> step.step_time, step.peak_memory
(11.0, (128, 118))
>>> step.spans[1]
((2.0, 3.0), (3.0, 5.0), (5.0, 6.0), (6.0, 8.0))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, TypeVar

from parcompiler.errors import InputError, PlanError
from parcompiler.instruction import EMBEDDING, HEAD, Instruction
from parcompiler.schedules.action import Orders
from parcompiler.schedules.schedule import Schedule
from parcompiler.timeline.collectives import SharedLayers
from parcompiler.timeline.costs import Message, StageCost, VocabularyCost
from parcompiler.timeline.embeddings import whole_walk
from parcompiler.timeline.lists import InstructionNames
from parcompiler.timeline.memory import memory, peaks
from parcompiler.timeline.order import OrderMemory, OrderTasks, OrderWalk, Send, StageLink
from parcompiler.timeline.program import Exchange, ProgramTasks, tasks_of
from parcompiler.timeline.run import INFINITY, START, Moments, run
from parcompiler.timeline.simulate import TaskPrices, seconds_of

ROUNDS = 8, 16, 32  # of one micro-batch for each rank, in which a steady state is looked for
MANY = 2  # times as many micro-batches are worth it
Step = TypeVar("Step")  # what is said of a step

EXACT = 1e-12  # of a step: what rounding may make of equal shifts


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a step, the most bytes on each rank, and when each action begins and ends."""

    step_time: float
    peak_memory: tuple[int, ...]
    spans: tuple[tuple[tuple[float, float], ...], ...] = field(repr=False)


def timing(
    schedule: Schedule,
    costs: Sequence[StageCost],
    messages: Sequence[Message],
    vocabulary: VocabularyCost | None = None,
) -> Timing:
    """What `simulate` says of a schedule whose stage j costs `costs[j]`.

    Messages are in the order in which a stage sends those of one micro-batch. `vocabulary` is the
    cost of the layers that all ranks share, S and T of the schedule among them. Raises PlanError
    when ranks wait for each other, InputError when the costs do not fit the stages.
    """
    return _timed(schedule, costs, messages, vocabulary)[0]


Schedules = Callable[[int], Schedule]  # by micro-batches


def timing_of_many(
    at: Schedules,
    microbatches: int,
    costs: Sequence[StageCost],
    messages: Sequence[Message],
    vocabulary: VocabularyCost | None = None,
) -> Timing:
    """`timing` of `at(microbatches)`, without its spans, sooner where that repeats itself: see
    `_repeated`. The most bytes are those of any steady state."""

    def run_few(schedule: Schedule, period: int) -> tuple[Timing, float | None]:
        return _timed(schedule, costs, messages, vocabulary, period)

    step, seconds = _repeated(at, microbatches, run_few, lambda step: step.step_time)
    return Timing(seconds, step.peak_memory, ())


def step_time(
    at: Schedules, microbatches: int, costs: Sequence[StageCost], messages: Sequence[Message]
) -> float:
    """The seconds of `timing_of_many` alone, sooner; no layers that all ranks share."""

    def run_few(schedule: Schedule, period: int) -> tuple[float, float | None]:
        _check(schedule.placement, costs, messages)
        tasks = _tasks(schedule.placement, links_of(messages), schedule.microbatches)
        codes = [[tasks.code(r, action) for action in own] for r, own in enumerate(schedule.orders)]
        moments = run(tasks.tasks, codes, _seconds(tasks, codes, schedule.orders, costs, messages))
        _check_end(schedule.orders, moments.stuck(codes))
        return moments.last, _pace_of_order(moments, schedule.microbatches, period)

    return _repeated(at, microbatches, run_few, lambda seconds: seconds)[1]


def _repeated(
    at: Schedules,
    microbatches: int,
    run_few: Callable[[Schedule, int], tuple[Step, float | None]],
    seconds_of_step: Callable[[Step], float],
) -> tuple[Step, float]:
    """The step of a few micro-batches, or of all, and the seconds of the step of all.

    In the steady state of a named schedule every action comes again `pace` seconds later for the
    micro-batch of the next round, one for each rank. Each begins at the latest of a few moments
    before, so that what has shifted alike through whole rounds goes on doing so (a max-plus linear
    system in its eigenvector: Baccelli et al., Synchronization and Linearity, 1992, chapter 3).
    Then rounds are multiplied instead of run.
    """
    ranks = at(1).ranks
    rest = microbatches % ranks
    for rounds in ROUNDS:
        few = rounds * ranks + rest
        if MANY * few > microbatches:
            break
        step, pace = run_few(at(few), ranks)
        if pace is not None:
            return step, seconds_of_step(step) + (microbatches - few) // ranks * pace
    step, _ = run_few(at(microbatches), 0)
    return step, seconds_of_step(step)


def _timed(
    schedule: Schedule,
    costs: Sequence[StageCost],
    messages: Sequence[Message],
    vocabulary: VocabularyCost | None,
    period: int = 0,
) -> tuple[Timing, float | None]:
    """The timing, and the pace of a `period` of micro-batches if there is a steady state."""
    _check(schedule.placement, costs, messages)
    has_head = any(action.kind in HEAD for order in schedule.orders for action in order)
    if vocabulary is None and has_head:
        message = "a schedule in which all ranks share the head needs its cost (no vocabulary=...)"
        raise InputError(message)
    links, untrained = links_of(messages), _untrained(costs)
    if vocabulary is None:
        walk, holding = _walk(schedule.placement, schedule.orders, links, untrained)
        return _timed_order(walk, holding, schedule.orders, costs, messages, period)
    source = vocabulary.source % len(schedule.placement) if has_head else None
    layers = SharedLayers(vocabulary.method, vocabulary.users, source)
    program = _program(schedule.placement, schedule.orders, links, layers, untrained)
    prices = _prices(costs, messages, vocabulary)
    moments = run(program.tasks, program.orders, seconds_of(program, prices))
    spans = tuple(
        tuple(
            (moments.begins[task], moments.ends[task])
            for task in order
            if program.lines[task][1].kind not in EMBEDDING
        )
        for order in program.orders
    )
    changes = memory(program, moments, schedule.placement, costs, vocabulary, prices.size)
    pace = _pace(program, moments, schedule.microbatches, period) if period else None
    return Timing(moments.last, peaks(changes), spans), pace


def _timed_order(
    walk: OrderWalk,
    holding: OrderMemory,
    orders: Orders,
    costs: Sequence[StageCost],
    messages: Sequence[Message],
    period: int = 0,
) -> tuple[Timing, float | None]:
    """`_timed` without layers that all ranks share: the tasks of the order itself say as much as
    those of its instruction lists, and are sooner made."""
    tasks = walk.pipeline
    moments = run(tasks.tasks, walk.codes, _seconds(tasks, walk.codes, orders, costs, messages))
    begins, ends = moments.begins, moments.ends
    spans = tuple(tuple((begins[code], ends[code]) for code in own) for own in holding.orders)

    def size(sent: Send) -> int:
        return messages[sent.number].nbytes

    changes = memory(holding, moments, tasks.placement, costs, VocabularyCost(), size)
    pace = _pace_of_order(moments, tasks.microbatches, period)
    return Timing(moments.last, peaks(changes), spans), pace


def _pace_of_order(moments: Moments, m: int, period: int) -> float | None:
    """The pace of the actions and messages of an order (see `_common_pace`); None for no period."""
    if not period:
        return None
    rows = (moments.begins[row : row + m] for row in range(0, len(moments.begins), m))
    return _common_pace((row for row in rows if row[0] < INFINITY), moments.last, m, period)


def _pace(program: ProgramTasks, moments: Moments, m: int, period: int) -> float | None:
    """The pace of the instructions and exchanges of a program (see `_common_pace`)."""
    begins: dict[object, dict[int, float]] = {}
    lines = [*program.lines, *((START, what) for what in program.exchanges)]
    for begin, (rank, line) in zip(moments.begins, lines, strict=True):
        if line.microbatch is not None:
            begins.setdefault((rank, _without_microbatch(line)), {})[line.microbatch] = begin
    return _common_pace(begins.values(), moments.last, m, period)


def _common_pace(
    begins: Iterable[Mapping[int, float] | Sequence[float]], last: float, m: int, period: int
) -> float | None:
    """By how many seconds everything shifts from a period to the next in the middle of a step of m
    micro-batches that ends at `last`; `begins` are by micro-batch."""
    pace: float | None = None
    middle, rounding = range(m // 2 - 2 * period, m // 2 + period), EXACT * last
    for by_microbatch in begins:
        for i in middle:
            shift = by_microbatch[i + period] - by_microbatch[i]
            pace = shift if pace is None else pace
            if abs(shift - pace) > rounding:
                return None
    return pace


def _without_microbatch(line: Exchange) -> tuple[object, ...]:
    """What an instruction or a message is, whatever its micro-batch."""
    if isinstance(line, Instruction):
        return line.kind, line.stage, line.value, line.gradient, line.peer
    return line.source, line.target, line.value, line.gradient


def order_peaks(
    tasks: OrderTasks,
    orders: Orders,
    costs: Sequence[StageCost],
    messages: Sequence[Message],
) -> tuple[int, ...]:
    """The peaks of `timing` alone, sooner, for orders that end; no layers that all ranks share."""
    walk = OrderWalk(tasks, orders)
    step, _ = _timed_order(walk, walk.memory(_untrained(costs)), orders, costs, messages)
    return step.peak_memory


def _seconds(
    tasks: OrderTasks,
    codes: Sequence[Sequence[int]],
    orders: Orders,
    costs: Sequence[StageCost],
    messages: Sequence[Message],
) -> list[float]:
    """Seconds by task and message."""
    seconds = tasks.seconds([0.0] * tasks.classes, pairs_of(messages))
    for own, order in zip(codes, orders, strict=True):
        for code, action in zip(own, order, strict=True):
            seconds[code] = costs[action.stage].seconds(action.kind)
    return seconds


def pairs_of(messages: Sequence[Message]) -> list[tuple[float, float]]:
    """Seconds of each message and of its gradient."""
    return [(message.seconds, message.gradient or 0.0) for message in messages]


def _untrained(costs: Sequence[StageCost]) -> frozenset[int]:
    """The stages without a backward."""
    return frozenset(j for j, cost in enumerate(costs) if not cost.trained)


def links_of(messages: Sequence[Message]) -> tuple[StageLink, ...]:
    """What joins the stages, whatever it takes."""
    return tuple(StageLink(x.source, x.targets, x.gradient is not None) for x in messages)


@lru_cache(maxsize=32)
def _tasks(
    placement: tuple[int, ...], links: tuple[StageLink, ...], microbatches: int
) -> OrderTasks:
    """Who waits for whom, whatever the order."""
    return OrderTasks(placement, links, microbatches)


@lru_cache(maxsize=32)
def _walk(
    placement: tuple[int, ...],
    orders: Orders,
    links: tuple[StageLink, ...],
    untrained: frozenset[int],
) -> tuple[OrderWalk, OrderMemory]:
    """A walk through an order that ends, and what it holds, whatever its seconds are."""
    microbatches = 1 + max(action.microbatch for order in orders for action in order)
    walk = OrderWalk(_tasks(placement, links, microbatches), orders)
    _check_end(orders, walk.stuck)
    return walk, walk.memory(untrained)


class _Ends(NamedTuple):
    """The names of what a stage receives and gives."""

    receives: tuple[str, ...]
    gives: tuple[str, ...]


@lru_cache(maxsize=32)
def _program(
    placement: tuple[int, ...],
    orders: Orders,
    links: tuple[StageLink, ...],
    layers: SharedLayers,
    untrained: frozenset[int],
) -> ProgramTasks:
    """The tasks of the lists that lowering would write, whatever their seconds are."""
    names = [f"v{number}" for number in range(len(links))]
    receives: list[list[str]] = [[] for _ in placement]
    gives: list[list[str]] = [[] for _ in placement]
    for name, link in zip(names, links, strict=True):
        gives[link.source].append(name)
        for user in link.targets:
            receives[user].append(name)
    embedded, head = [], ("", -1)
    for k, user in enumerate(layers.users):
        receives[user].append(f"e{k}")
        embedded.append((f"e{k}", placement[user]))
    if layers.source is not None:
        gives[layers.source].append("x")
        head = "x", placement[layers.source]
    walk = whole_walk(placement, orders, links, layers)
    _check_end(orders, walk.stuck)
    ends = [_Ends(tuple(r), tuple(g)) for r, g in zip(receives, gives, strict=True)]
    return tasks_of(InstructionNames(names, embedded, head).lists(walk, untrained), ends)


def _prices(
    costs: Sequence[StageCost], messages: Sequence[Message], vocabulary: VocabularyCost
) -> TaskPrices:
    """Seconds and bytes by the names of `_program`."""
    sizes = {f"v{number}": x.nbytes for number, x in enumerate(messages)}
    lookups = max(1, len(vocabulary.users))
    sizes |= {f"e{k}": vocabulary.embedded_bytes // lookups for k in range(len(vocabulary.users))}
    pairs = {f"v{number}": pair for number, pair in enumerate(pairs_of(messages))}
    sizes["x"] = vocabulary.x_bytes
    return TaskPrices(
        costs, sizes, lambda x: pairs[x.value][x.gradient], lambda _: 0.0, vocabulary, lookups
    )


def _check(
    placement: Sequence[int], costs: Sequence[StageCost], messages: Sequence[Message]
) -> None:
    """Raise InputError for costs and messages of other stages than there are."""
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
    """Raise PlanError that names the actions at which ranks wait for ever."""
    if stuck:
        first = f"the schedule never ends: {len(stuck)} of its {len(orders)} ranks wait"
        where = (f"  * rank {rank} at {orders[rank][k].cell}" for rank, k in stuck)
        message = "\n".join([f"{first} (check the order of these actions)", *where])
        raise PlanError(message)
