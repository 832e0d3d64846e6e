"""The table of schedules: bubbles and activations by simulation, against their closed formulas.

p ranks, m micro-batches, v stages per rank; f, b and w are the times of forward, input backward
and weight backward of one rank's share, and C their sum. Communication is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any, NamedTuple

import pytest

from parcompiler.instruction import COMPUTE, Instruction
from parcompiler.lower import StageProgram, communicate
from parcompiler.schedules import SCHEDULES, Schedule, build
from parcompiler.timeline import StageCost, Timeline, simulate
from tests.timeline.test_simulate import chain


class Times(NamedTuple):
    """Seconds of one rank's share of one micro-batch. All are sums of powers of 2: no rounding."""

    f: float
    b: float
    w: float

    @property
    def sum(self) -> float:
        return self.f + self.b + self.w


EVEN = Times(1, 1, 1)
UNEVEN = [Times(1, 1.5, 0.5), Times(2, 1, 1)]
SIZES = [(p, m) for p in (2, 3, 4, 8, 16, 32) for m in sorted({1, p - 1, p, 2 * p, 4 * p, 8 * p})]
SMALL = [(p, m) for p, m in SIZES if p <= 8]
TIMED = [(p, m, EVEN) for p, m in SIZES] + [(p, m, times) for p, m in SMALL for times in UNEVEN]
MOST = 256  # p * m: 8 ranks with up to 4p micro-batches, 16 with up to p; more are swept


def swept(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The cases; the few largest, which take longer than all others, only in the long sweep."""
    sweep = pytest.mark.sweep
    return [pytest.param(*c, marks=sweep) if c[0] * c[1] > MOST else c for c in cases]


CASES = swept(TIMED)


@dataclass(frozen=True, slots=True)
class Measured:
    """A simulated step. By rank: seconds idle from its own first begin to its last end; peaks."""

    idle: float  # seconds of the whole step in which a rank does not compute, the same on all
    spans: tuple[float, ...]
    peaks: tuple[Fraction, ...]


@lru_cache(maxsize=8)
def lowered(
    name: str, p: int, m: int, v: int
) -> tuple[Schedule, tuple[StageProgram, ...], tuple[tuple[Instruction, ...], ...]]:
    """A schedule on a chain of stages, and its instruction lists."""
    schedule = build(name, p, m, v)
    stages, values = chain(schedule.placement)
    return schedule, stages, communicate.training(schedule.orders, stages, values, ())


@cache
def measure(name: str, p: int, m: int, times: Times = EVEN, v: int = 0) -> Measured:
    """Simulate a step."""
    schedule, stages, lists = lowered(name, p, m, v or (2 if name == "interleaved" else 1))
    share = len(stages) // p
    f, b, w = (seconds / share for seconds in times)
    costs = [StageCost(f, b + w, resident=0, saved=1, weight=w)] * len(stages)
    sizes = {f"v{j}": 0 for j in range(len(stages))}
    timeline = simulate(lists, schedule.placement, costs, sizes, stages=stages)
    peaks = tuple(Fraction(peak, share) for peak in timeline.peak_memory)
    assert peaks == tuple(schedule.peak(r) for r in range(p))
    return Measured(timeline.step_time - m * times.sum, _spans(timeline, p, m * times.sum), peaks)


def _spans(timeline: Timeline, ranks: int, busy: float) -> tuple[float, ...]:
    """Seconds that each rank idles from its first begin to its last end."""
    begin, end = [float("inf")] * ranks, [0.0] * ranks
    for event in timeline.events:
        if event.instruction.kind in COMPUTE:
            begin[event.rank] = min(begin[event.rank], event.begin)
            end[event.rank] = max(end[event.rank], event.end)
    return tuple(last - first - busy for first, last in zip(begin, end, strict=True))


# Bubbles


@pytest.mark.parametrize(("p", "m", "times"), CASES)
def test_naive_computes_on_one_rank_at_a_time(p: int, m: int, times: Times) -> None:
    idle = measure("naive", p, m, times).idle
    assert idle == m * (p - 1) * times.sum
    assert idle / (idle + m * times.sum) == pytest.approx((p - 1) / p)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m", "times"), CASES)
def test_filling_and_emptying_the_pipe_takes_p_less_one_microbatches(
    name: str, p: int, m: int, times: Times
) -> None:
    assert measure(name, p, m, times).idle == (p - 1) * times.sum


# For m < p the only round is short: each of the v - 1 passages from one chunk to the next waits
# for p - m micro-batches that do not exist, C/v each.
@pytest.mark.parametrize(("p", "m", "times"), CASES)
def test_interleaved_fills_the_pipe_in_a_vth_of_the_time(p: int, m: int, times: Times) -> None:
    short = max(p - m, 0) * times.sum / 2
    assert measure("interleaved", p, m, times).idle == (p - 1) * times.sum / 2 + short


@pytest.mark.parametrize("v", [2, 3, 4, 5])
@pytest.mark.parametrize(("p", "m", "times"), [case for case in TIMED if case[0] <= 4])
def test_interleaved_with_any_number_of_stages(p: int, m: int, times: Times, v: int) -> None:
    short = max(p - m, 0) * times.sum * (v - 1) / v
    found = measure("interleaved", p, m, times, v).idle
    assert found == pytest.approx((p - 1) * times.sum / v + short)


# A last round of s < p micro-batches idles no longer than if it stood alone.
@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize("p", [2, 3, 4, 5])
def test_an_interleaved_last_round_that_is_short_idles_as_if_alone(p: int, v: int) -> None:
    for m in range(1, 4 * p):
        short = -m % p * EVEN.sum * (v - 1) / v
        whole = (p - 1) * EVEN.sum / v
        assert whole <= measure("interleaved", p, m, EVEN, v).idle + 1e-9
        assert measure("interleaved", p, m, EVEN, v).idle <= whole + short + 1e-9


# Exact while w <= f and w <= b. In the table for m >= p; with fewer there are fewer w to fill in.
@pytest.mark.parametrize(("p", "m", "times"), CASES)
def test_zb_h1_fills_the_bubble_with_weights(p: int, m: int, times: Times) -> None:
    f, b, w = times
    idle = measure("zb-h1", p, m, times).idle
    assert idle == (p - 1) * (f + b) - (min(m, p) - 1) * w
    if m >= p:
        assert idle == (p - 1) * (f + b - w)


# Exact while w <= f and 2w <= f + b. The table's formula is that of rank 0 for m >= 2p - 1; the
# others idle less. With fewer micro-batches there are fewer w to fill in.
@pytest.mark.parametrize(("p", "m", "times"), CASES)
def test_zb_h2_fills_twice_as_much_of_it(p: int, m: int, times: Times) -> None:
    f, b, w = times
    found = measure("zb-h2", p, m, times)
    assert found.spans[0] == max(found.spans) == (p - 1) * (f + b) - min(m - 1, 2 * p - 2) * w
    if m >= 2 * p - 1:
        assert found.spans == tuple((p - 1 - r) * (f + b - 2 * w) for r in range(p))
        assert found.idle == (p - 1) * max(f + b - 2 * w, f)


# With m < 2p - 1 it idles, but never longer than the way of one micro-batch to and fro, with
# nothing to fill in but its own weights.
@pytest.mark.parametrize(("p", "m"), swept(SIZES))
def test_zb_v_has_no_bubble_when_all_times_are_equal(p: int, m: int) -> None:
    found = measure("zb-v", p, m)
    if m >= 2 * p - 1:
        assert found.spans == (0,) * p
        assert found.idle == (p - 1) / 2
    else:
        assert 0 < max(found.spans) <= found.idle <= 2 * (p - 1) - 1 / 2


# m = 1 cannot be faster: 2p forwards and 2p backwards of half a share, one after the other, then
# the weights of one stage, while each rank has 3 to do.
@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min"])
@pytest.mark.parametrize("p", [2, 3, 4, 8, 16, 32])
def test_one_microbatch_on_a_v_idles_for_its_way(name: str, p: int) -> None:
    for times in (EVEN, *UNEVEN):
        f, b, w = times
        assert measure(name, p, 1, times).idle == (p - 1) * (f + b) - w / 2


# "About half": the bounds hold for p = 2 to 40, and the bubble does not depend on m from m = p on.
@pytest.mark.parametrize(("p", "m"), swept([(p, m) for p, m in SIZES if m >= p]))
def test_v_half_has_about_half_the_bubble_of_1f1b(p: int, m: int) -> None:
    ratio = measure("v-half", p, m).idle / measure("1f1b", p, m).idle
    assert 0.41 < ratio < 0.57
    assert measure("v-half", p, m).idle == measure("v-half", p, p).idle


# "About two thirds" is 2/3 - 1/(6(p - 1)) exactly, for every m.
@pytest.mark.parametrize(("p", "m"), swept(SIZES))
def test_v_min_has_about_two_thirds_of_the_bubble_of_1f1b(p: int, m: int) -> None:
    found = measure("v-min", p, m)
    assert found.idle == 2 * (p - 1) - 1 / 2
    assert found.idle / measure("1f1b", p, m).idle == pytest.approx(2 / 3 - 1 / (6 * (p - 1)))


GROWING = [Times(f, b, w) for f in (0.5, 1) for b in (0.5, 1.25, 2) for w in (0.25, 1, 3)]


# The table's condition for v-half, w + 2b >= 2f and w + 2f >= 2b, is where this law says 0. On two
# ranks v-min adds less, for half of its steps are passed on within a rank.
@pytest.mark.parametrize("p", [2, 3, 4, 5])
@pytest.mark.parametrize("times", GROWING)
def test_each_microbatch_adds_to_the_bubble_of_a_v_what_its_period_lacks(
    p: int, times: Times
) -> None:
    f, b, w = times
    added = {
        "v-half": max(abs(f - b) - w / 2, 0),
        "v-min": max(2 * max(f, b) - min(f, b) - w, 0),
    }
    for name, seconds in added.items():
        grown = measure(name, p, 8 * p, times).idle - measure(name, p, 4 * p, times).idle
        if p == 2 and name == "v-min":
            assert grown <= 4 * p * seconds
        else:
            assert grown == 4 * p * seconds


# Activations


def peaks(name: str, p: int, m: int) -> Sequence[Fraction | int]:
    """The table's activations, at most m: of every rank, or the most on any rank.

    The table has those of rank 0 for interleaved; r ranks later 2r fewer halves are alive.
    """
    wanted: dict[str, Sequence[Fraction | int]] = {
        "naive": [1] * p,
        "gpipe": [m] * p,
        "1f1b": [p - r for r in range(p)],
        "pipedream": [p - r for r in range(p)],
        "interleaved": [p + Fraction(p - 1, 2) - r for r in range(p)],
        "zb-h1": [p] * p,
        "zb-h2": [2 * p - 1] * p,
        "zb-v": [p],
        "v-half": [(p + 2) // 2],
        "v-min": [(p + 4) // 3],
    }
    return [min(peak, m) for peak in wanted[name]]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), swept(SIZES))
def test_activations_are_those_of_the_table(name: str, p: int, m: int) -> None:
    found = measure(name, p, m).peaks
    wanted = peaks(name, p, m)
    assert max(found) == max(wanted)
    if name == "interleaved" and m < p:  # a short round empties the later ranks sooner
        assert all(peak <= most for peak, most in zip(found, wanted, strict=True))
    elif len(wanted) == p:
        assert found == tuple(wanted)
    elif name == "zb-v" and m >= 2 * p - 1:
        assert found == (p,) * p


@pytest.mark.parametrize("v", [2, 3, 4, 5])
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_rank_0_of_interleaved_keeps_a_pipe_and_a_vth_of_one_less(p: int, v: int) -> None:
    for m in (2 * p, 4 * p):
        assert max(measure("interleaved", p, m, EVEN, v).peaks) == p + Fraction(p - 1, v)
