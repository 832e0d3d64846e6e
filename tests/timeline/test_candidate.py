"""The fast evaluator against the simulator on lowered orders: the same seconds, the same bytes."""

import random
import time
from collections.abc import Set as AbstractSet
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from parcompiler.errors import InputError, PlanError
from parcompiler.instruction import COMPUTE, EMBEDDING, Kind
from parcompiler.lower import Lowered, StageValue, communicate
from parcompiler.schedules import Schedule, build
from parcompiler.schedules.action import backward, forward
from parcompiler.schedules.v_shape import v_placement
from parcompiler.timeline import First, Message, StageCost, Timeline, simulate, step_time, timing
from parcompiler.timeline.candidate import (
    TimedOrder,
    links_of,
    order_peaks,
    timed_order,
    timing_of_many,
)
from parcompiler.timeline.order import OrderTasks
from tests.timeline.test_simulate import stage

NAMES = ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved", "zb-v", "v-half", "v-min")


def random_costs(chance: random.Random, stages: int) -> list[StageCost]:
    """Uneven seconds and bytes."""
    return [
        StageCost(
            forward=chance.uniform(0.5, 2),
            backward=chance.uniform(1, 3),
            resident=chance.randrange(20, 100),
            saved=chance.randrange(50),
            weight=chance.uniform(0, 1),
            left=chance.randrange(50),
            forward_more=chance.randrange(30),
            backward_more=chance.randrange(30),
            input_more=chance.randrange(30),
            weight_more=chance.randrange(30),
            update=chance.choice([0, 0, 200]),
            first=First(
                gradients=chance.randrange(10, 20),
                later=chance.randrange(10),
                backward_more=chance.randrange(30),
                input_more=chance.randrange(30),
                weight_more=chance.randrange(30),
            ),
        )
        for _ in range(stages)
    ]


def random_messages(chance: random.Random, stages: int) -> list[Message]:
    """A chain, with values beside it that go to several stages or have no gradient."""
    found = []
    for j in range(stages - 1):
        seconds = chance.choice([0.0, chance.random(), 3.0])
        found.append(Message(j, (j + 1,), seconds, seconds, chance.randrange(100)))
        for _ in range(2):
            if chance.random() < 0.3 and j < stages - 2:
                later = range(j + 1, stages)
                targets = tuple(sorted(chance.sample(later, chance.randint(1, len(later)))))
                seconds = chance.random()
                gradient = chance.choice([None, seconds])
                found.append(Message(j, targets, seconds, gradient, chance.randrange(100)))
    return found


def freeze(count: int, costs: list[StageCost], messages: list[Message]) -> None:
    """Train nothing in the first stages, and send no gradient back to them."""
    for j in range(count):
        costs[j] = replace(costs[j], backward=0.0, weight=0.0, first=First(), trained=False)
    for n, message in enumerate(messages):
        if message.source < count:
            messages[n] = replace(message, gradient=None)


def simulated(schedule: Schedule, costs: list[StageCost], messages: list[Message]) -> Timeline:
    """The lowered order in the simulator."""
    values = {
        f"v{n}": StageValue(
            f"v{n}", (1,), torch.float32, x.gradient is not None, x.source, tuple(x.targets)
        )
        for n, x in enumerate(messages)
    }
    stages = [
        stage(
            j,
            rank,
            [name for name, value in values.items() if j in value.consumers],
            [name for name, value in values.items() if j == value.producer],
            loss=j == len(schedule.placement) - 1,
            trained=costs[j].trained,
        )
        for j, rank in enumerate(schedule.placement)
    ]
    sizes = {f"v{n}": x.nbytes for n, x in enumerate(messages)}
    seconds = {f"v{n}": x.seconds for n, x in enumerate(messages)}
    lowered = cast(Lowered, SimpleNamespace(stages=stages))
    return simulate(
        communicate.training(schedule.orders, stages, values, ()),
        schedule.placement,
        costs,
        sizes,
        lambda value, source, target: seconds[value],
        stages=lowered.stages,
    )


def spans_of(timed: TimedOrder) -> list[list[tuple[float, float]]]:
    """Start and end of each action by rank, without embeddings and backwards of frozen stages."""
    moments, frozen = timed.run(), {j for j, cost in enumerate(timed.costs) if not cost.trained}
    return [
        [
            (moments.begins[code], moments.ends[code])
            for code, (kind, stage, _) in zip(codes, actions, strict=True)
            if kind not in EMBEDDING and (kind is Kind.FORWARD or stage not in frozen)
        ]
        for codes, actions in zip(timed.walk.codes, timed.walk.actions, strict=True)
    ]


def spans_in(step: Timeline, rank: int, kinds: AbstractSet[Kind]) -> list[tuple[float, float]]:
    """Start and end of the instructions of these kinds on a rank."""
    events = [e for e in step.events if e.rank == rank and e.instruction.kind in kinds]
    return [(e.begin, e.end) for e in sorted(events, key=lambda e: e.begin)]


@pytest.mark.parametrize("seed", range(80))
def test_the_simulator_says_the_same(seed: int) -> None:
    chance = random.Random(seed)
    name, p, m = chance.choice(NAMES), chance.randint(1, 4), chance.randint(1, 7)
    schedule = build(name, p, m, chance.randint(2, 3) if name == "interleaved" else 1)
    costs = random_costs(chance, len(schedule.placement))
    messages = random_messages(chance, len(schedule.placement))
    if seed % 4 == 0:
        freeze(chance.randrange(len(costs)), costs, messages)
    found, wanted = timing(schedule, costs, messages), simulated(schedule, costs, messages)
    assert found.step_time == pytest.approx(wanted.step_time, rel=1e-12)
    assert found.peak_memory == wanted.peak_memory
    tasks = OrderTasks(schedule.placement, links_of(messages), m)
    assert order_peaks(tasks, schedule.orders, costs, messages) == wanted.peak_memory
    timed = timed_order(schedule, costs, messages)
    assert spans_of(timed) == [spans_in(wanted, rank, COMPUTE) for rank in range(p)]


@pytest.mark.parametrize("seed", range(36))
def test_a_steady_state_that_is_multiplied_is_the_whole_step(seed: int) -> None:
    check_many(seed, random.Random(seed).randint(70, 140), unevenness=None)


@pytest.mark.parametrize("seed", range(18))
def test_ranks_that_drift_apart_for_hundreds_of_microbatches_are_multiplied(seed: int) -> None:
    check_many(seed, random.Random(seed).randint(150, 250), unevenness=0.01)


@pytest.mark.sweep
@pytest.mark.parametrize("unevenness", [0.3, 0.01, 0.001])
@pytest.mark.parametrize("seed", range(18, 120))
def test_many_orders_are_multiplied(seed: int, unevenness: float) -> None:
    check_many(seed, random.Random(seed).randint(150, 500), unevenness)


def check_many(seed: int, m: int, unevenness: float | None) -> None:
    """The seconds and bytes of many micro-batches, found from a few and run as a whole; stages that
    are uneven by a share, or in any way."""
    chance = random.Random(seed)
    name, p = NAMES[seed % len(NAMES)], chance.randint(2, 6)
    stages_per_rank = chance.randint(2, 3) if name == "interleaved" else 1

    def at(microbatches: int) -> Schedule:
        return build(name, p, microbatches, stages_per_rank)

    costs = random_costs(chance, len(at(1).placement))
    if unevenness is not None:
        for j, cost in enumerate(costs):
            f, b, w = (chance.uniform(1 - unevenness, 1 + unevenness) for _ in range(3))
            costs[j] = replace(cost, forward=f, backward=2 * b, weight=0.9 * w)
    messages = random_messages(chance, len(at(1).placement))
    whole = timing(at(m), costs, messages)
    found = timing_of_many(at, m, costs, messages)
    assert found.step_time == pytest.approx(whole.step_time, rel=1e-9)
    assert found.peak_memory == whole.peak_memory
    assert step_time(at, m, costs, messages) == pytest.approx(whole.step_time, rel=1e-9)


def test_mixed_whole_and_parted_backwards_are_timed() -> None:
    parted, whole = build("zb-h1", 2, 3), build("1f1b", 2, 3)
    mixed = Schedule("mixed", (0, 1), (whole.orders[0], parted.orders[1]))
    chance = random.Random(0)
    costs, messages = random_costs(chance, 2), [Message(0, (1,), 0.5, 0.5, 7)]
    found, wanted = timing(mixed, costs, messages), simulated(mixed, costs, messages)
    assert found.step_time == pytest.approx(wanted.step_time, rel=1e-12)
    assert found.peak_memory == wanted.peak_memory


def test_a_gradient_has_its_own_seconds() -> None:
    cost = StageCost(1.0, 2.0, 0, 0)
    found = timing(build("gpipe", 2, 1), [cost, cost], [Message(0, (1,), 0.5, 0.25, 0)])
    assert found.step_time == 1 + 0.5 + 1 + 2 + 0.25 + 2


def test_ranks_that_wait_for_each_other_are_named() -> None:
    orders = (
        (forward(0, 0), backward(0, 0), forward(0, 1), backward(0, 1)),
        (forward(1, 1), backward(1, 1), forward(1, 0), backward(1, 0)),
    )
    cost = StageCost(1.0, 1.0, 0, 0)
    wanted = r"never ends: 2 of its 2 ranks wait[^*]*\* rank 0 at 0B0\n  \* rank 1 at 1F1"
    with pytest.raises(PlanError, match=wanted):
        timing(Schedule("own", (0, 1), orders), [cost] * 2, [Message(0, (1,), 0.0, 0.0, 0)])


def test_stages_of_one_rank_in_the_wrong_order_never_end() -> None:
    order = (forward(1, 0), forward(0, 0), backward(1, 0), backward(0, 0))
    cost = StageCost(1.0, 1.0, 0, 0)
    with pytest.raises(PlanError, match="rank 0 at 1F0"):
        timing(Schedule("own", (0, 0), (order,)), [cost] * 2, [Message(0, (1,), 0.0, 0.0, 0)])


@pytest.mark.parametrize(
    ("costs", "messages", "wanted"),
    [
        (1, [], r"every stage needs a cost \(2 stages, 1 costs\)"),
        (2, [Message(0, (2,), 0.0, 0.0, 0)], r"from 0 to \(2,\), 2 stages"),
        (2, [Message(1, (1,), 0.0, 0.0, 0)], r"from 1 to \(1,\), 2 stages"),
    ],
)
def test_costs_of_other_stages_are_refused(
    costs: int, messages: list[Message], wanted: str
) -> None:
    with pytest.raises(InputError, match=wanted):
        timing(build("1f1b", 2, 2), [StageCost(1.0, 1.0, 0, 0)] * costs, messages)


@pytest.mark.sweep
def test_many_ranks_and_microbatches_are_fast() -> None:
    schedule = build("zb-v", 64, 512)
    assert schedule.placement == v_placement(64)
    messages = [Message(j, (j + 1,), 0.1, 0.1, 4) for j in range(127)]
    begin = time.process_time()
    timing(schedule, [StageCost(1.0, 2.0, 1, 1, 1.0)] * 128, messages)
    assert time.process_time() - begin < 3.0  # 0.8 s on an idle core
