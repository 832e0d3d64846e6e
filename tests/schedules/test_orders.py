"""Every schedule: its order is complete and possible, its counts are right, its words are clear."""

from collections.abc import Iterator
from fractions import Fraction

import pytest

import parcompiler as pc
from parcompiler.instruction import Kind
from parcompiler.schedules import SCHEDULES, Action, Schedule, build
from parcompiler.schedules.action import backward, backward_input, backward_weight, forward

V = ("zb-v", "v-half", "v-min")
SPLIT = ("zb-h1", "zb-h2", *V)  # backwards in two parts
SIZES = [(p, m) for p in range(1, 8) for m in (*range(1, 2 * p + 3), 3 * p, 4 * p + 1)]
CHUNKS = {name: (1,) for name in SCHEDULES} | {"interleaved": (2, 3, 4)}


def every_size(name: str) -> Iterator[tuple[int, int, Schedule]]:
    for p, m in SIZES:
        for v in CHUNKS[name]:
            yield p, m, build(name, p, m, v)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_runs_everything_once_on_its_rank(name: str) -> None:
    makers = (forward, backward_input, backward_weight) if name in SPLIT else (forward, backward)
    for _, m, schedule in every_size(name):
        for r, order in enumerate(schedule.orders):
            own = [j for j, rank in enumerate(schedule.placement) if rank == r]
            wanted = {make(j, i) for make in makers for j in own for i in range(m)}
            assert len(order) == len(wanted)
            assert set(order) == wanted


# So gradients of one parameter add up as they do in one process.
@pytest.mark.parametrize("name", SCHEDULES)
def test_each_stage_takes_microbatches_in_their_order(name: str) -> None:
    for _, m, schedule in every_size(name):
        kinds: dict[tuple[Kind, int], list[int]] = {}
        for order in schedule.orders:
            for action in order:
                kinds.setdefault((action.kind, action.stage), []).append(action.microbatch)
        assert all(found == list(range(m)) for found in kinds.values())


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_ranks_can_run_their_orders_without_waiting_for_ever(name: str) -> None:
    for p, m, schedule in every_size(name):
        assert left_over(schedule) == 0, f"p={p} m={m}"


def left_over(schedule: Schedule) -> int:
    """How many actions never get what they need, when ranks run their orders as far as they can."""
    done: set[Action] = set()
    position = [0] * len(schedule.orders)
    total = sum(map(len, schedule.orders))
    before = -1
    while before < len(done) < total:
        before = len(done)
        for r, order in enumerate(schedule.orders):
            for action in order[position[r] :]:
                if not needs(action, len(schedule.placement)) <= done:
                    break
                done.add(action)
                position[r] += 1
    return total - len(done)


def needs(action: Action, stages: int) -> set[Action]:
    """What has to be finished before an action can start."""
    kind, j, i = action
    if kind is Kind.FORWARD:
        return {forward(j - 1, i)} if j else set()
    if kind is Kind.BACKWARD_WEIGHT:
        return {backward_input(j, i)}
    later = {action._replace(stage=j + 1)} if j < stages - 1 else set()
    return {forward(j, i), *later}


@pytest.mark.parametrize("name", SCHEDULES)
def test_activations_are_counted_from_forward_to_the_end_of_backward(name: str) -> None:
    for p, _, schedule in every_size(name):
        share = len(schedule.placement) // p
        assert [schedule.in_flight(j) for j in range(p * share)] == [
            max(alive(schedule, schedule.placement[j], {j})) for j in range(p * share)
        ]
        assert [schedule.peak(r) for r in range(p)] == [
            Fraction(max(alive(schedule, r, set(range(p * share)))), share) for r in range(p)
        ]


def alive(schedule: Schedule, rank: int, stages: set[int]) -> Iterator[int]:
    """Forwards less finished backwards of some stages, after each action of a rank."""
    order = schedule.orders[rank]
    for k in range(len(order)):
        past = [a.kind for a in order[: k + 1] if a.stage in stages]
        ended = past.count(Kind.BACKWARD) + past.count(Kind.BACKWARD_WEIGHT)
        yield past.count(Kind.FORWARD) - ended


def test_interleaved_stages_go_round_the_ranks() -> None:
    assert build("interleaved", 3, 4, 2).placement == (0, 1, 2, 0, 1, 2)


@pytest.mark.parametrize("name", V)
def test_v_stages_go_down_the_ranks_and_up_again(name: str) -> None:
    assert build(name, 3, 4).placement == (0, 1, 2, 2, 1, 0)
    assert build(name, 3, 4, 2) == build(name, 3, 4)


@pytest.mark.parametrize("name", V)
def test_v_schedules_are_possible_on_many_ranks(name: str) -> None:
    for p in range(8, 41):
        assert left_over(build(name, p, 3)) == 0


def test_an_impossible_order_would_be_noticed() -> None:
    first, second = build("gpipe", 2, 2).orders
    late = (second[1], second[2], second[0], second[3])
    assert left_over(Schedule("", (0, 1), (first, late))) == 5


def orders(schedule: Schedule) -> list[str]:
    """What each rank computes; without the stage where a rank has one."""
    several = len(schedule.placement) > schedule.ranks
    return [" ".join(a.cell if several else str(a) for a in order) for order in schedule.orders]


def test_weights_wait_where_that_fills_a_bubble() -> None:
    assert orders(build("zb-h1", 3, 4)) == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]
    assert orders(build("zb-h2", 2, 4)) == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_several_stages_have_these_orders() -> None:
    assert orders(build("interleaved", 2, 3, 2)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 2B1 2F2 0B0 0B1 2B2 0B2",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1B1 3F2 3B2 1B2",
    ]
    assert orders(build("zb-v", 2, 3)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2",
    ]
    assert orders(build("v-min", 2, 2)) == [
        "0F0 3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0I1 0W1",
        "1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 2W1 1W1",
    ]


def test_schedules_that_order_alike_are_equal_whatever_their_names() -> None:
    assert build("1f1b", 1, 4) == build("naive", 1, 4)
    assert build("1f1b", 2, 4) != build("naive", 2, 4)
    assert hash(build("1f1b", 1, 4)) == hash(build("naive", 1, 4))


def test_an_unknown_schedule_is_refused_with_all_that_can_be_built() -> None:
    with pytest.raises(pc.InputError) as caught:
        build("1f2b", 2, 2)
    assert str(caught.value) == (
        "unknown schedule '1f2b' (known: naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, "
        "v-half, v-min, pipedream)"
    )


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_one_stage_on_each_rank_cannot_be_several(name: str) -> None:
    wanted = rf"{name} has one stage on each rank: .* interleaved \(virtual_stages=2 given\)"
    with pytest.raises(pc.InputError, match=wanted):
        build(name, 2, 4, 2)


def test_interleaved_needs_several_stages_on_each_rank() -> None:
    wanted = r"interleaved needs virtual_stages >= 2 \(virtual_stages=1 given\)"
    with pytest.raises(pc.InputError, match=wanted):
        build("interleaved", 2, 4)


@pytest.mark.parametrize("name", V)
def test_a_v_always_has_two_stages_on_each_rank(name: str) -> None:
    with pytest.raises(pc.InputError, match=rf"{name} always has 2 stages .*=3 given"):
        build(name, 2, 4, 3)


@pytest.mark.parametrize("name", SCHEDULES)
def test_counts_below_one_are_refused(name: str) -> None:
    for counts in ((0, 4, 2), (2, 0, 2), (2, 4, 0)):
        with pytest.raises(pc.InputError, match=r"at least one of .* \(0 given\)"):
            build(name, *counts)


def test_a_schedule_prints_as_the_picture_people_know() -> None:
    assert str(build("1f1b", 2, 3)).splitlines() == [
        "rank 0  F0 F1 .  .  B0--- F2 B1--- .  B2---",
        "rank 1  .  F0 B0--- F1 B1--- F2 B2---",
    ]
    assert str(build("v-min", 2, 2)).splitlines() == [
        "rank 0  0F0 .   .   3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 .   0I1 0W1",
        "rank 1  .   1F0 2F0 .   .   2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 2W1 1W1",
    ]


def test_ranks_that_wait_for_each_other_print_their_orders() -> None:
    first, second = build("1f1b", 2, 2).orders
    assert str(Schedule("", (0, 1), (first, second[::-1]))).splitlines() == [
        "rank 0  F0 F1 B0 B1",
        "rank 1  B1 F1 B0 F0",
    ]
