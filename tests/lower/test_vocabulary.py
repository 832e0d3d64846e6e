"""Where the collectives of the vocabulary stand: they hold up nobody, and do not come too early."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from parcompiler.instruction import BACKWARDS, Instruction, Kind, parse
from parcompiler.lower import StageProgram, StageValue, communicate
from parcompiler.lower.lowered import Spread, SpreadLayer
from parcompiler.schedules import Schedule, build
from parcompiler.schedules.action import NOWHERE
from parcompiler.schedules.vocabulary import spread
from parcompiler.timeline import Message, StageCost, Timeline, VocabularyCost, simulate, timing
from tests.schedules.test_vocabulary import bare

BARRIERS = {"vocab-1": 2, "vocab-2": 1}
RATIOS = [
    (1.0, 2.0, 0.5, 0.5),
    (1.0, 1.0, 2.0, 1.0),
    (1.0, 2.0, 0.1, 0.2),
    (1.0, 3.0, 0.5, 0.7),
]  # f, b, s, t


def lists(
    schedule: Schedule, method: str, users: Sequence[int] = (0,), *, headed: bool = True
) -> tuple[list[StageProgram], Sequence[Sequence[Instruction]]]:
    """The lowered step of a chain that takes embeddings at some stages."""
    last = len(schedule.placement) - 1
    chain = {f"v{j}": (j, (j + 1,)) for j in range(last)}
    embedded = {f"e{k}": (NOWHERE, (user,)) for k, user in enumerate(users)}
    ends = {**embedded, **chain, **({"x": (last, (NOWHERE,))} if headed else {})}
    values = {n: StageValue(n, (1,), torch.float32, True, a, to) for n, (a, to) in ends.items()}
    stages = [
        StageProgram(
            j, rank, (), (), (),
            tuple(name for name, (_, to) in ends.items() if j in to),
            tuple(name for name, (source, _) in ends.items() if j == source),
            None if headed or j < last else "loss", (),
        )
        for j, rank in enumerate(schedule.placement)
    ]  # fmt: skip
    nothing = cast(Any, None)
    lookups = tuple(
        SpreadLayer(name, nothing, user, ()) for name, user in zip(embedded, users, strict=True)
    )
    head = SpreadLayer("x", nothing, last, ()) if headed else None
    shared = Spread(method, lookups, head, {})
    return stages, communicate.training(schedule.orders, stages, values, (), shared)


def simulated(
    schedule: Schedule,
    method: str,
    ratio: tuple[float, float, float, float],
    users: Sequence[int] = (0,),
) -> Timeline:
    """The step where all communication and all embeddings are free."""
    f, b, s, t = ratio
    each = len(schedule.placement) // schedule.ranks
    stages, found = lists(schedule, method, users)
    cost = StageCost(f / each, b / each, 0, 1, weight=b / each / 2)
    costs = [cost] * len(stages)
    last = len(stages) - 1
    shared = VocabularyCost(s=s, t=t, source=last, method=method, users=tuple(users))
    sizes = {name: 0 for stage in stages for name in (*stage.receives, *stage.gives)}
    timeline = simulate(found, schedule.placement, costs, sizes, stages=stages, vocabulary=shared)
    messages = [Message(j, (j + 1,), 0.0, 0.0, 0) for j in range(last)]
    said = timing(schedule, costs, messages, shared)
    assert said.step_time == pytest.approx(timeline.step_time)
    assert said.peak_memory == timeline.peak_memory
    return timeline


def check(ranks: int) -> None:
    """The bubble and the peak of 1F1B are those of the reference."""
    for method, k in BARRIERS.items():
        for m in (ranks + k, 2 * ranks + 3):
            schedule = spread(build("1f1b", ranks, m), method)
            for ratio in RATIOS:
                f, b, s, t = ratio
                for users in ((), (0,)):
                    timeline = simulated(schedule, method, ratio, users)
                    idle = timeline.step_time - m * (f + b + s + t)
                    assert idle == pytest.approx((ranks - 1) * (f + b)), (method, m, ratio, users)
                    assert max(timeline.peak_memory) == ranks + k


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_lowered_1f1b_has_the_bubble_and_the_peak_of_the_reference(ranks: int) -> None:
    check(ranks)


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [16, 32])
def test_lowered_1f1b_has_them_for_many_ranks(ranks: int) -> None:
    check(ranks)


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb-h1", "v-half"])
@pytest.mark.parametrize("method", ["naive", "vocab-1", "vocab-2"])
def test_free_embeddings_take_no_time(name: str, method: str) -> None:
    schedule = spread(bare(name, 4, 9), method)
    for ratio in RATIOS:
        alone = simulated(schedule, method, ratio, ()).step_time
        middle = len(schedule.placement) // 2
        for users in ((0,), (0, middle)):
            found = simulated(schedule, method, ratio, users).step_time
            assert found == pytest.approx(alone), (ratio, users)


LISTS = (
    """
    EMBED e0 mb 0
    REDUCE e0 mb 0 to 0
    EMBED e0 mb 1
    REDUCE e0 mb 1 to 0
    FORWARD stage 0 mb 0
    SEND v0 mb 0 to 1
    EMBED e0 mb 2
    REDUCE e0 mb 2 to 0
    BROADCAST x mb 0 from 1
    FORWARD stage 0 mb 1
    SEND v0 mb 1 to 1
    S mb 0
    EXCHANGE statistics mb 0
    REDUCE x.grad mb 0 to 1
    BROADCAST x mb 1 from 1
    FORWARD stage 0 mb 2
    SEND v0 mb 2 to 1
    T mb 0
    S mb 1
    EXCHANGE statistics mb 1
    REDUCE x.grad mb 1 to 1
    BROADCAST x mb 2 from 1
    RECV v0.grad mb 0 from 1
    BACKWARD stage 0 mb 0
    T mb 1
    S mb 2
    EXCHANGE statistics mb 2
    REDUCE x.grad mb 2 to 1
    BROADCAST e0.grad mb 0 from 0
    RECV v0.grad mb 1 from 1
    BACKWARD stage 0 mb 1
    BROADCAST e0.grad mb 1 from 0
    RECV v0.grad mb 2 from 1
    BACKWARD stage 0 mb 2
    BROADCAST e0.grad mb 2 from 0
    T mb 2
    EMBED_BACKWARD e0 mb 0
    EMBED_BACKWARD e0 mb 1
    EMBED_BACKWARD e0 mb 2
    SHARE_LOSS from 1
    """,
    """
    EMBED e0 mb 0
    REDUCE e0 mb 0 to 0
    EMBED e0 mb 1
    REDUCE e0 mb 1 to 0
    EMBED e0 mb 2
    REDUCE e0 mb 2 to 0
    RECV v0 mb 0 from 0
    RECV v0 mb 1 from 0
    FORWARD stage 1 mb 0
    BROADCAST x mb 0 from 1
    S mb 0
    EXCHANGE statistics mb 0
    REDUCE x.grad mb 0 to 1
    RECV v0 mb 2 from 0
    FORWARD stage 1 mb 1
    BROADCAST x mb 1 from 1
    BACKWARD stage 1 mb 0
    SEND v0.grad mb 0 to 0
    T mb 0
    S mb 1
    EXCHANGE statistics mb 1
    REDUCE x.grad mb 1 to 1
    FORWARD stage 1 mb 2
    BROADCAST x mb 2 from 1
    BACKWARD stage 1 mb 1
    SEND v0.grad mb 1 to 0
    T mb 1
    S mb 2
    EXCHANGE statistics mb 2
    REDUCE x.grad mb 2 to 1
    BROADCAST e0.grad mb 0 from 0
    BACKWARD stage 1 mb 2
    SEND v0.grad mb 2 to 0
    T mb 2
    BROADCAST e0.grad mb 1 from 0
    BROADCAST e0.grad mb 2 from 0
    EMBED_BACKWARD e0 mb 0
    EMBED_BACKWARD e0 mb 1
    EMBED_BACKWARD e0 mb 2
    SHARE_LOSS from 1
    """,
)


def test_collectives_stand_behind_what_a_rank_gives_for_them() -> None:
    _, found = lists(spread(build("1f1b", 2, 3), "vocab-2"), "vocab-2")
    assert tuple(found) == tuple(map(parse, LISTS))


@pytest.mark.parametrize("method", ["naive", "interlaced", "vocab-1", "vocab-2"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "v-half"])
@pytest.mark.parametrize("headed", [True, False])
def test_all_ranks_have_the_same_collectives_in_one_order(
    name: str, method: str, headed: bool
) -> None:
    schedule = bare(name, 4, 9)
    schedule = spread(schedule, method) if headed else schedule
    _, found = lists(schedule, method, (0, 2), headed=headed)
    kinds = (Kind.BROADCAST, Kind.REDUCE, Kind.EXCHANGE)
    first, *others = [[line for line in own if line.kind in kinds] for own in found]
    assert len(set(first)) == len(first) and len(first) >= 4 * 9
    assert all(own == first for own in others)


@pytest.mark.parametrize("method", BARRIERS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "v-half"])
def test_what_one_rank_gives_does_not_pile_up_on_the_others(name: str, method: str) -> None:
    """Until their last backward, from when on nothing else is kept."""
    _, found = lists(spread(bare(name, 4, 24), method), method)
    for own in found[1:]:
        waiting = 0
        last = max(k for k, line in enumerate(own) if line.kind in BACKWARDS)
        for line in own[:last]:
            waiting += line.kind is Kind.BROADCAST
            waiting -= line.kind in (Kind.S, Kind.EMBED_BACKWARD)
            assert waiting <= 2
