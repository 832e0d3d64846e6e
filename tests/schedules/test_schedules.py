"""Schedules: every order is complete and possible, and keeps as much alive as it says."""

from collections.abc import Iterator

import pytest

import parcompiler as pc
from parcompiler.instruction import Kind
from parcompiler.schedules import Action, Schedule, build

NAMES = ("naive", "gpipe", "1f1b")
SIZES = [(p, m) for p in range(1, 9) for m in range(1, 21)]


def every_size(name: str) -> Iterator[tuple[int, int, Schedule]]:
    for p, m in SIZES:
        yield p, m, build(name, p, m)


@pytest.mark.parametrize("name", NAMES)
def test_every_stage_runs_each_forward_and_each_backward_once(name: str) -> None:
    for p, m, schedule in every_size(name):
        assert schedule.name == name
        assert schedule.placement == tuple(range(p))
        for r, order in enumerate(schedule.orders):
            wanted = {
                Action(kind, r, i) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in range(m)
            }
            assert len(order) == 2 * m
            assert set(order) == wanted


@pytest.mark.parametrize("name", NAMES)
def test_a_backward_comes_after_its_forward(name: str) -> None:
    for _, m, schedule in every_size(name):
        for order in schedule.orders:
            for i in range(m):
                kinds = [action.kind for action in order if action.microbatch == i]
                assert kinds == [Kind.FORWARD, Kind.BACKWARD]


@pytest.mark.parametrize("name", NAMES)
def test_backwards_run_in_the_order_of_one_process(name: str) -> None:
    for _, m, schedule in every_size(name):
        for order in schedule.orders:
            backwards = [a.microbatch for a in order if a.kind is Kind.BACKWARD]
            assert backwards == list(range(m))


@pytest.mark.parametrize("name", NAMES)
def test_the_ranks_can_run_their_orders_without_waiting_for_ever(name: str) -> None:
    for p, m, schedule in every_size(name):
        done: set[Action] = set()
        position = [0] * p
        while len(done) < 2 * m * p:
            ready = [
                (r, order[position[r]])
                for r, order in enumerate(schedule.orders)
                if position[r] < len(order) and set(needs(order[position[r]], p)) <= done
            ]
            assert ready, f"p={p} m={m}: stuck after {len(done)} actions"
            for r, action in ready:
                done.add(action)
                position[r] += 1


def needs(action: Action, p: int) -> Iterator[Action]:
    """What has to be finished before an action can start."""
    kind, j, i = action
    if kind is Kind.BACKWARD:
        yield Action(Kind.FORWARD, j, i)
        if j < p - 1:
            yield Action(Kind.BACKWARD, j + 1, i)
    elif j > 0:
        yield Action(Kind.FORWARD, j - 1, i)


@pytest.mark.parametrize("name", NAMES)
def test_as_many_microbatches_are_in_flight_as_the_schedule_says(name: str) -> None:
    for p, m, schedule in every_size(name):
        wanted = {
            "naive": [1] * p,
            "gpipe": [m] * p,
            "1f1b": [min(p - r, m) for r in range(p)],
        }
        assert [schedule.in_flight(j) for j in range(p)] == wanted[name]


def test_schedules_are_lines_of_cells() -> None:
    assert build("gpipe", 2, 2).cells() == ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    assert build("naive", 2, 2).cells() == ("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1")
    assert build("1f1b", 3, 4).cells() == (
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    )


def test_an_unknown_schedule_is_refused_with_those_there_are() -> None:
    with pytest.raises(pc.InputError, match=r"'waltz' \(known: naive, gpipe, 1f1b"):
        build("waltz", 2, 2)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "what"), [(0, 4, "ranks"), (2, 0, "micro-batches"), (-1, 1, "ranks")]
)
def test_counts_below_one_are_refused(ranks: int, microbatches: int, what: str) -> None:
    with pytest.raises(pc.InputError, match=f"at least one of {what}"):
        build("1f1b", ranks, microbatches)
