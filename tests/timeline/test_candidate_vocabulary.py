"""The evaluator with a vocabulary on all ranks against the simulator on lowered orders."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from parcompiler.errors import InputError, PlanError
from parcompiler.instruction import COMPUTE, HEAD, parse
from parcompiler.lower import Lowered, StageValue, communicate
from parcompiler.lower.lowered import Spread, SpreadLayer
from parcompiler.schedules import Schedule, build
from parcompiler.schedules.action import NOWHERE
from parcompiler.schedules.vocabulary import spread
from parcompiler.schedules.vocabulary_walk import METHODS
from parcompiler.timeline import Message, StageCost, Timeline, VocabularyCost, simulate, timing
from parcompiler.timeline.candidate import timed_order
from tests.timeline.test_candidate import (
    NAMES,
    random_costs,
    random_messages,
    spans_in,
    spans_of,
)
from tests.timeline.test_simulate import stage


def random_vocabulary(
    chance: random.Random, method: str, stages: int, *, headed: bool = True
) -> VocabularyCost:
    """Uneven seconds and bytes; embeddings for no stage, the first, or several of any."""
    many = tuple(chance.randrange(stages) for _ in range(chance.randint(2, 6)))
    users = chance.choice([() if headed else (0,), (0,), many])
    shared = ("s", "t", "embed", "embed_backward", "broadcast", "exchange", "reduce")
    seconds = {name: chance.random() for name in (*shared, "embed_reduce", "embed_broadcast")}
    return VocabularyCost(
        **seconds,
        normalize=chance.random() if method in ("naive", "interlaced") else 0.0,
        resident=chance.randrange(100),
        saved=chance.randrange(20, 50),
        reused=chance.randrange(20),
        more=chance.randrange(3) * 10,
        source=stages - 1 if headed else -1,
        method=method,
        users=users,
        x_bytes=chance.randrange(30),
        embedded_bytes=len(users) * chance.randrange(30),
    )


def simulated(
    schedule: Schedule, costs: list[StageCost], messages: list[Message], cost: VocabularyCost
) -> Timeline:
    """The lowered order in the simulator."""
    last = len(schedule.placement) - 1
    values = {
        f"v{n}": StageValue(
            f"v{n}", (1,), torch.float32, x.gradient is not None, x.source, x.targets
        )
        for n, x in enumerate(messages)
    }
    head = SpreadLayer("x", cast(Any, None), last, ()) if cost.source >= 0 else None
    if head:
        values["x"] = StageValue("x", (1,), torch.float32, True, last, (NOWHERE,))
    for k, user in enumerate(cost.users):
        values[f"e{k}"] = StageValue(f"e{k}", (1,), torch.float32, True, NOWHERE, (user,))
    stages = [
        stage(
            j,
            rank,
            [name for name, value in values.items() if j in value.consumers],
            [name for name, value in values.items() if j == value.producer],
            loss=j == last and head is None,
        )
        for j, rank in enumerate(schedule.placement)
    ]
    lookups = [SpreadLayer(f"e{k}", cast(Any, None), user, ()) for k, user in enumerate(cost.users)]
    shared = Spread(cost.method, tuple(lookups), head, {})
    sizes = {f"v{n}": x.nbytes for n, x in enumerate(messages)} | {"x": cost.x_bytes}
    sizes |= {f"e{k}": cost.embedded_bytes // len(cost.users) for k in range(len(cost.users))}
    seconds = {f"v{n}": x.seconds for n, x in enumerate(messages)}
    lowered = cast(Lowered, SimpleNamespace(stages=stages))
    return simulate(
        communicate.training(schedule.orders, stages, values, (), shared),
        schedule.placement,
        costs,
        sizes,
        lambda value, source, target: seconds[value],
        stages=lowered.stages,
        vocabulary=cost,
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_simulator_says_the_same(seed: int) -> None:
    check(seed)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(40, 1000))
def test_the_simulator_says_the_same_of_many(seed: int) -> None:
    check(seed)


def check(seed: int) -> None:
    """The same seconds and bytes for a random order, method and costs."""
    chance = random.Random(seed)
    name, p, m = chance.choice(NAMES), chance.randint(1, 4), chance.randint(1, 6)
    bare = build(name, p, m, chance.randint(2, 3) if name == "interleaved" else 1)
    method = chance.choice(METHODS)
    headed = chance.random() < 0.75
    schedule = spread(bare, method) if headed else bare
    costs = random_costs(chance, len(schedule.placement))
    messages = random_messages(chance, len(schedule.placement))
    cost = random_vocabulary(chance, method, len(schedule.placement), headed=headed)
    found = timing(schedule, costs, messages, cost)
    wanted = simulated(schedule, costs, messages, cost)
    assert found.step_time == pytest.approx(wanted.step_time, rel=1e-12)
    assert found.peak_memory == wanted.peak_memory
    timed = timed_order(schedule, costs, messages, cost)
    assert spans_of(timed) == [spans_in(wanted, rank, COMPUTE | HEAD) for rank in range(p)]


def test_a_head_without_a_cost_is_refused() -> None:
    schedule = spread(build("1f1b", 2, 2), "vocab-1")
    with pytest.raises(InputError, match="needs its cost"):
        timing(schedule, [StageCost(1.0, 1.0, 0, 0)] * 2, [])
    lines = (parse("S mb 0"), ())
    with pytest.raises(InputError, match=r"needs a cost \(S mb 0, no vocabulary"):
        simulate(lines, [0, 1], [StageCost(1.0, 1.0, 0, 0)] * 2, {})


TWO = (
    """
    FORWARD stage 0 mb 0
    BROADCAST x mb 0 from 1
    S mb 0
    EXCHANGE statistics mb 0
    T mb 0
    REDUCE x.grad mb 0 to 1
    BACKWARD stage 0 mb 0
    """,
    """
    FORWARD stage 1 mb 0
    BROADCAST x mb 0 from 1
    S mb 0
    EXCHANGE statistics mb 0
    T mb 0
    REDUCE x.grad mb 0 to 1
    BACKWARD stage 1 mb 0
    """,
)
COST = VocabularyCost(s=1.0, t=2.0, broadcast=0.5, exchange=0.25, reduce=0.125, saved=7, resident=3)


def test_every_barrier_takes_its_time() -> None:
    costs = [StageCost(1.0, 2.0, 0, 0), StageCost(3.0, 2.0, 0, 0)]
    timeline = simulate([parse(text) for text in TWO], [0, 1], costs, {"x": 10}, vocabulary=COST)
    begins = {str(e.instruction): e.begin for e in timeline.events if e.rank == 1}
    assert begins["BROADCAST x mb 0 from 1"] == 3.0
    assert begins["S mb 0"] == 3.5
    assert begins["EXCHANGE statistics mb 0"] == 4.5
    assert begins["T mb 0"] == 4.75
    assert begins["REDUCE x.grad mb 0 to 1"] == 6.75
    assert begins["BACKWARD stage 1 mb 0"] == 6.875
    assert timeline.step_time == 8.875
    assert timeline.bubble[1] == pytest.approx(1 - 8.0 / 8.875)
    assert timeline.peak_memory == (20, 20)  # 3 + 7 + x, which is there from its line on
    assert "S0" in str(timeline) and "T0" in str(timeline)


def test_a_matrix_that_the_next_micro_batch_reuses_stays_behind_its_own() -> None:
    costs = [StageCost(1.0, 2.0, 0, 0, backward_more=100)] * 2
    more = TWO[0].replace("mb 0", "mb 1"), TWO[1].replace("mb 0", "mb 1")
    lists = [parse(one + two) for one, two in zip(TWO, more, strict=True)]
    peaks = [
        simulate(lists, [0, 1], costs, {"x": 0}, vocabulary=replace(COST, reused=size)).peak_memory
        for size in (0, 5)
    ]
    assert peaks == [(103, 103), (108, 108)]  # in a backward, when no head is in flight


def test_ranks_that_miss_a_collective_are_named() -> None:
    lists = [parse(TWO[0]), parse(TWO[1].replace("EXCHANGE statistics mb 0", ""))]
    costs = [StageCost(1.0, 2.0, 0, 0)] * 2
    wanted = r"rank 0 at T mb 0: waits for EXCHANGE statistics mb 0"
    with pytest.raises(PlanError, match=wanted):
        simulate(lists, [0, 1], costs, {"x": 10}, vocabulary=COST)
