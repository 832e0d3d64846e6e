"""Orders in which all ranks share the head: bubbles and peaks of the reference, and validity."""

from collections import Counter
from pathlib import Path

import pytest

from parcompiler.errors import InputError
from parcompiler.instruction import HEAD, Kind
from parcompiler.schedules import SCHEDULES, Schedule, build
from parcompiler.schedules.action import Action
from parcompiler.schedules.vocabulary import INTERVALS, spread
from parcompiler.schedules.vocabulary_walk import METHODS
from tests.schedules.barriers import step_time

NAMES = tuple(name for name in SCHEDULES if name != "pipedream")
RATIOS = [
    (1.0, 2.0, 0.5, 0.5),
    (1.0, 1.0, 2.0, 1.0),
    (1.0, 2.0, 0.1, 0.1),
    (1.0, 3.0, 0.5, 0.7),
]  # f, b, s, t
BARRIERS = {"vocab-2": 1, "vocab-1": 2}


def bare(name: str, ranks: int, microbatches: int) -> Schedule:
    """A schedule by its name."""
    return build(name, ranks, microbatches, 2 if name == "interleaved" else 1)


def bubble(
    schedule: Schedule, method: str, f: float, b: float, s: float, t: float, w: float = 0.0
) -> float:
    """The seconds of a step in which a rank does nothing, when only barriers hold it up."""
    return step_time(schedule, method, f, b, s, t, w) - schedule.microbatches * (f + b + s + t)


def peak(schedule: Schedule) -> float:
    """The most activations on a rank."""
    return float(max(schedule.peak(rank) for rank in range(schedule.ranks)))


def check(ranks: int) -> None:
    """1F1B has the bubble and the peak of the reference."""
    for method, k in BARRIERS.items():
        for m in (ranks + k, 2 * ranks + 3, 4 * ranks):
            schedule = spread(build("1f1b", ranks, max(m, ranks + k)), method)
            assert peak(schedule) == ranks + k
            for f, b, s, t in RATIOS:
                found = bubble(schedule, method, f, b, s, t)
                assert found == pytest.approx((ranks - 1) * (f + b)), (method, m, f, b, s, t)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_1f1b_has_the_bubble_and_the_peak_of_the_reference(ranks: int) -> None:
    check(ranks)


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", range(2, 33))
def test_1f1b_has_them_for_many_ranks(ranks: int) -> None:
    check(ranks)


def test_the_order_is_that_of_the_paper() -> None:
    cells = spread(build("1f1b", 4, 8), "vocab-2").cells()
    first = "F1 F2 F3 F4 S1 F5 T1 S2 T2 S3 T3 S4 B1 F6 T4 S5 B2 F7"
    last = "F1 S1 F2 B1 T1 S2 F3 B2 T2 S3 F4 B3"
    assert cells[0].startswith(_counted_from_1(first, 0))
    assert cells[3].startswith(_counted_from_1(last, 3))


def _counted_from_1(text: str, stage: int) -> str:
    """The cells that the paper counts from 1."""
    return " ".join(
        f"{'' if cell[0] in 'ST' else stage}{cell[0]}{int(cell[1:]) - 1}" for cell in text.split()
    )


@pytest.mark.parametrize("name", ["v-half", "v-min", "zb-v", "zb-h1", "1f1b", "interleaved"])
@pytest.mark.parametrize("method", INTERVALS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_barrier_keeps_one_more_microbatch(name: str, method: str, ranks: int) -> None:
    schedule = bare(name, ranks, 6 * ranks)
    assert peak(spread(schedule, method)) == peak(schedule) + INTERVALS[method]


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb-h1", "zb-v", "v-half"])
@pytest.mark.parametrize("method", BARRIERS)
def test_no_schedule_idles_more_than_1f1b(name: str, method: str) -> None:
    schedule = spread(bare(name, 4, 16), method)
    for f, b, s, t in [(1.0, 2.0, 0.5, 0.5), (1.0, 2.0, 2.0, 2.0)]:
        assert bubble(schedule, method, f, b, s, t, w=1.0) <= 3 * (f + b) + 1e-9


def valid(schedule: Schedule, method: str) -> None:
    """S and T once on every rank, in one order; nobody waits for ever; stages do what they did."""
    found = spread(schedule, method)
    shared = [[a for a in order if a.kind in HEAD] for order in found.orders]
    assert all(own == shared[0] for own in shared)
    kinds = [Kind.S, Kind.T]
    kinds += [Kind.NORMALIZE] if method in ("naive", "interlaced") else []
    wanted = Counter(Action(kind, -1, i) for kind in kinds for i in range(schedule.microbatches))
    assert Counter(shared[0]) == wanted
    for order, before in zip(found.orders, schedule.orders, strict=True):
        own = [a for a in order if a.kind not in HEAD]
        for forward in (True, False):
            assert [a for a in own if (a.kind is Kind.FORWARD) is forward] == [
                a for a in before if (a.kind is Kind.FORWARD) is forward
            ]
    bubble(found, method, 1.0, 2.0, 0.5, 0.5, w=1.0)  # raises when ranks wait for each other
    assert Schedule.parse("again", found.cells()) == found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (1, 3), (2, 1), (3, 2), (4, 5)])
def test_all_orders_are_valid(name: str, method: str, ranks: int, microbatches: int) -> None:
    valid(bare(name, ranks, microbatches), method)


@pytest.mark.sweep
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_many_orders_are_valid(name: str, method: str) -> None:
    for ranks in (1, 2, 3, 4, 5, 6, 8, 11, 16):
        for microbatches in sorted({1, 2, 3, ranks, ranks + 1, ranks + 2, 2 * ranks + 1, 24}):
            valid(bare(name, ranks, microbatches), method)


def test_one_microbatch_at_a_time_stays_so() -> None:
    for method in METHODS:
        assert peak(spread(build("naive", 3, 4), method)) == 1


def test_an_order_of_ones_own_is_spread() -> None:
    cells = ["0F0 0F1 0F2 0B2 0B1 0B0", "1F0 1F1 1F2 1B2 1B1 1B0"]
    for method in METHODS:
        valid(Schedule.parse("own", cells), method)


def test_interlaced_keeps_half_as_many_again() -> None:
    assert peak(spread(build("1f1b", 8, 32), "interlaced")) == 12


def test_spreading_twice_changes_nothing() -> None:
    once = spread(build("1f1b", 3, 4), "vocab-1")
    assert spread(once, "vocab-1") is once


def test_asynchronous_schedules_and_other_methods_are_refused() -> None:
    with pytest.raises(InputError, match="'pipedream', which updates parameters"):
        spread(build("pipedream", 2, 4), "vocab-2")
    with pytest.raises(InputError, match=r"unknown vocabulary method 'vocab-3' \(known: naive"):
        spread(build("1f1b", 2, 4), "vocab-3")


@pytest.mark.parametrize(
    ("cells", "wanted"),
    [
        (["0F0 S0 T0 0B0", "1F0 S0 1B0"], "rows 1 and 2 differ in S, N and T"),
        (["0F0 S0 0B0", "1F0 S0 1B0"], "T0 is missing"),
        (["0F0 T0 S0 0B0", "1F0 T0 S0 1B0"], "T0 S0 stand in this order"),
        (["0F0 S0 T0 S1 T1 0B0", "1F0 S0 T0 S1 T1 1B0"], "S1 is of a micro-batch that no stage"),
        (["0F0 0S0 0B0", "1F0 1B0"], "row 1, column 2 is '0S0', which is no action"),
        (["0F0 S0 S0 0B0", "1F0 S0 1B0"], "S0 stands twice"),
    ],
)
def test_wrong_cells_of_the_head_are_named(cells: list[str], wanted: str) -> None:
    with pytest.raises(InputError, match=wanted):
        Schedule.parse("own", cells)


def test_the_csv_of_torch_has_stages_alone(tmp_path: Path) -> None:
    schedule = build("1f1b", 2, 3)
    path = tmp_path / "order.csv"
    spread(schedule, "vocab-1").to_csv(path)
    text = path.read_text(encoding="utf-8")
    assert "S" not in text and "T" not in text
    assert Schedule.from_csv(path).microbatches == 3
