"""Few rounds of a loop stand for many."""

import pytest

from parcompiler.schedules import SCHEDULES, build, vocabulary
from parcompiler.schedules.rounds import shortened
from parcompiler.schedules.vocabulary import spread
from parcompiler.schedules.vocabulary_walk import METHODS

LOOPED = [name for name in SCHEDULES if name != "gpipe"]


@pytest.mark.parametrize("name", LOOPED)
def test_orders_without_rounds_are_those_of_fewer_microbatches(name: str) -> None:
    for ranks, microbatches in ((2, 40), (3, 100), (4, 61)):
        stages = 2 if name == "interleaved" else 1
        orders, rounds = shortened(build(name, ranks, microbatches, stages).orders)
        assert rounds > 0
        fewer = build(name, ranks, microbatches - rounds * ranks, stages)
        assert tuple(map(tuple, orders)) == fewer.orders


def test_orders_without_a_loop_stay_as_they_are() -> None:
    orders = build("gpipe", 2, 40).orders
    assert shortened(orders) == (orders, 0)
    few = build("1f1b", 2, 20).orders
    assert shortened(few) == (few, 0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [name for name in LOOPED if name != "pipedream"])
def test_slots_go_where_a_walk_through_all_rounds_puts_them(
    name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ranks, microbatches in ((2, 31), (3, 76), (4, 101)):
        schedule = build(name, ranks, microbatches, 2 if name == "interleaved" else 1)
        found = spread.__wrapped__(schedule, method)
        with monkeypatch.context() as patched:
            patched.setattr(vocabulary, "shortened", lambda orders: (orders, 0))
            assert found == spread.__wrapped__(schedule, method)
