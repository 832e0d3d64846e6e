"""The simulator against closed formulas, against numbers found by hand, and a stupid second one."""

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from parcompiler.errors import InputError, PlanError
from parcompiler.instruction import COMPUTE, Instruction, Kind, parse
from parcompiler.lower import Lowered, StageProgram, StageValue, communicate
from parcompiler.prices import simulate_lowered
from parcompiler.schedules import Action, build
from parcompiler.schedules.schedule import backward, forward
from parcompiler.timeline import StageCost, Timeline, TimelineEvent, simulate
from tests.timeline.causes import unbroken

F, B = 1.0, 2.0  # seconds of every stage in the tests with closed formulas
ONE = StageCost(forward=F, backward=B, resident=0, saved=1)  # memory counts activations
NAMES = ("naive", "gpipe", "1f1b")
CASES = [(p, m) for p in (1, 2, 3, 4, 8) for m in sorted({1, p - 1, p, 2 * p, 4 * p} - {0})]


def chain(ranks: Sequence[int]) -> tuple[tuple[StageProgram, ...], dict[str, StageValue]]:
    """Stage j on rank `ranks[j]` gives `v{j}` of 4 bytes to stage j + 1."""
    last = len(ranks) - 1
    return (
        tuple(
            stage(j, r, [f"v{j - 1}"] if j else [], [f"v{j}"] if j < last else [], loss=j == last)
            for j, r in enumerate(ranks)
        ),
        {f"v{j}": value(f"v{j}", j, j + 1) for j in range(last)},
    )


def stage(
    j: int,
    rank: int,
    receives: Sequence[str],
    gives: Sequence[str],
    loss: bool = False,
    trained: bool = True,
) -> StageProgram:
    """A stage of which only the wiring matters."""
    name = "loss" if loss else None
    return StageProgram(j, rank, (), (), (), tuple(receives), tuple(gives), name, (), trained)


def value(name: str, producer: int, *consumers: int) -> StageValue:
    """A differentiable value of 4 bytes."""
    return StageValue(name, (1,), torch.float32, True, producer, consumers)


def lowered_chain(name: str, ranks: int, microbatches: int) -> Lowered:
    """A chain of one stage per rank under a named schedule; it has no graph."""
    stages, values = chain(range(ranks))
    return lowered(build(name, ranks, microbatches).orders, stages, values, microbatches)


def lowered(
    orders: Sequence[Sequence[Action]],
    stages: Sequence[StageProgram],
    values: Mapping[str, StageValue],
    microbatches: int,
) -> Lowered:
    """The parts of a lowered program that a simulation reads."""
    return cast(
        Lowered,
        SimpleNamespace(
            stages=stages,
            values=values,
            instructions=communicate.training(orders, stages, values, ()),
            evaluation=communicate.evaluation(len(orders), microbatches, stages, values),
        ),
    )


def run(
    lists: Sequence[str],
    costs: Sequence[StageCost],
    sizes: Mapping[str, int] | None = None,
    seconds: Callable[[str, int, int], float] = lambda value, source, target: 0.0,
) -> Timeline:
    """Simulate programs written as text; stage j is on rank j."""
    programs = [parse(text.replace(";", "\n")) for text in lists]
    return simulate(programs, range(len(costs)), costs, sizes or {"x": 0}, seconds)


def begins(timeline: Timeline) -> dict[str, float]:
    """When each compute instruction and message begins; messages are told apart by their text."""
    return {str(event.instruction): event.begin for event in timeline.events}


# Closed formulas, with free communication


@pytest.mark.parametrize(("p", "m"), CASES)
def test_naive_idles_for_all_but_one_rank(p: int, m: int) -> None:
    timeline = simulate_lowered(lowered_chain("naive", p, m), [ONE] * p)
    assert timeline.step_time == m * p * (F + B)
    assert timeline.bubble == pytest.approx([(p - 1) / p] * p)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), CASES)
def test_pipelines_take_as_many_slots_as_microbatches_and_ranks_less_one(
    name: str, p: int, m: int
) -> None:
    timeline = simulate_lowered(lowered_chain(name, p, m), [ONE] * p)
    assert timeline.step_time == (m + p - 1) * (F + B)
    assert timeline.bubble == pytest.approx([(p - 1) / (m + p - 1)] * p)


def test_steps_follow_sooner_where_ranks_do_not_meet_and_idle_at_neither_end() -> None:
    """The bubbles of section 2.3 of the zero-bubble paper are those of each rank's own span."""
    p, m = 4, 12
    cost = StageCost(forward=1.0, backward=2.0, weight=1.0, resident=0, saved=1, step=0.5)
    for name, step, period in (
        ("1f1b", 3 * (m + p - 1), 3 * (m + p - 1)),
        ("zb-h2", 3 * m + p - 1, 3 * m),
    ):
        timeline = simulate_lowered(lowered_chain(name, p, m), [cost] * p)
        assert (timeline.step_time, timeline.period) == (step + 0.5, period + 0.5), name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m"), CASES)
def test_peaks_in_activations_are_those_of_the_schedule(name: str, p: int, m: int) -> None:
    peaks = {
        "naive": [1] * p,
        "gpipe": [m] * p,
        "1f1b": [min(p - r, m) for r in range(p)],
    }
    program = lowered_chain(name, p, m)
    sizes = dict.fromkeys(program.values, 0)
    timeline = simulate(program.instructions, range(p), [ONE] * p, sizes)
    assert list(timeline.peak_memory) == peaks[name]


@pytest.mark.parametrize(("p", "m"), CASES)
def test_an_evaluation_is_forwards_only_and_keeps_no_activations(p: int, m: int) -> None:
    timeline = simulate_lowered(lowered_chain("1f1b", p, m), [ONE] * p, evaluation=True)
    assert timeline.step_time == (m + p - 1) * F
    assert timeline.peak_memory[0] == 1
    assert all(levels[-1][1] == 0 for levels in timeline.memory)


# Found by hand


def test_the_slowest_stage_sets_the_pace() -> None:
    costs = [StageCost(1, 1, 0, 1), StageCost(3, 3, 0, 1), StageCost(1, 1, 0, 1)]
    timeline = simulate_lowered(lowered_chain("gpipe", 3, 4), costs)
    # Rank 1: forwards from 1 to 13; rank 2 ends F3 at 14 and its B0 at 15; B0 to B3 from 15 to 27.
    assert timeline.step_time == 28
    assert timeline.bubble == pytest.approx([20 / 28, 4 / 28, 20 / 28])


def test_latency_delays_two_ranks_as_found_by_hand() -> None:
    program = lowered_chain("1f1b", 2, 2)
    sizes = {name: value.nbytes for name, value in program.values.items()}
    timeline = simulate_lowered(program, [ONE] * 2, lambda value, *_: sizes[value] / 8)
    # rank 0  F0 0-1   F1 1-2                         B0 5-7      B1 8-10
    # 0 -> 1         v0 1-1.5  v0 2-2.5
    # rank 1                F0 1.5-2.5  B0 2.5-4.5  F1 4.5-5.5  B1 5.5-7.5
    # 1 -> 0                                  grad 4.5-5           grad 7.5-8
    first, last = "SEND v0 mb {} to 1", "SEND v0.grad mb {} to 0"
    assert begins(timeline) == {
        "FORWARD stage 0 mb 0": 0.0,
        "FORWARD stage 0 mb 1": 1.0,
        first.format(0): 1.0,
        "FORWARD stage 1 mb 0": 1.5,
        first.format(1): 2.0,
        "BACKWARD stage 1 mb 0": 2.5,
        "FORWARD stage 1 mb 1": 4.5,
        last.format(0): 4.5,
        "BACKWARD stage 0 mb 0": 5.0,
        "BACKWARD stage 1 mb 1": 5.5,
        last.format(1): 7.5,
        "BACKWARD stage 0 mb 1": 8.0,
        "SHARE_LOSS from 1": 10.0,
    }
    assert timeline.step_time == 10.0
    assert timeline.bubble == pytest.approx([0.4, 0.4])


def test_messages_queue_on_one_link_and_not_on_two() -> None:
    lists = [
        "FORWARD stage 0 mb 0;SEND x mb 0 to 1;SEND x mb 1 to 1;SEND y mb 0 to 2",
        "RECV x mb 0 from 0;RECV x mb 1 from 0;FORWARD stage 1 mb 0;FORWARD stage 1 mb 1",
        "RECV y mb 0 from 0;FORWARD stage 2 mb 0",
    ]
    costs = [StageCost(1, 1, 0, 0)] * 3
    found = begins(run(lists, costs, {"x": 0, "y": 0}, lambda value, source, target: 5.0))
    assert found["SEND x mb 0 to 1"] == 1.0
    assert found["SEND x mb 1 to 1"] == 6.0
    assert found["SEND y mb 0 to 2"] == 1.0
    assert found["FORWARD stage 1 mb 1"] == 11.0


def test_sending_does_not_hold_the_compute_up() -> None:
    lists = ["FORWARD stage 0 mb 0;SEND x mb 0 to 1;FORWARD stage 0 mb 1", "RECV x mb 0 from 0"]
    timeline = run(lists, [ONE, ONE], {"x": 0}, lambda value, source, target: 9.0)
    assert begins(timeline)["FORWARD stage 0 mb 1"] == 1.0
    assert timeline.step_time == 10.0


def test_sums_begin_when_all_of_their_ranks_have_come_and_hold_nobody_up() -> None:
    reduce = "REDUCE_GRADIENTS tied_0 ranks 0,2"
    lists = [
        f"FORWARD stage 0 mb 0;{reduce};SHARE_LOSS from 2",
        "FORWARD stage 1 mb 0;SHARE_LOSS from 2",
        f"FORWARD stage 2 mb 0;{reduce};SHARE_LOSS from 2",
    ]
    costs = [StageCost(seconds, 0, 0, 0) for seconds in (1.0, 2.0, 3.0)]
    timeline = simulate(
        [parse(text.replace(";", "\n")) for text in lists],
        range(3),
        costs,
        {},
        collective_seconds=lambda line: 4.0 if line.kind is Kind.REDUCE_GRADIENTS else 1.0,
    )
    when = {
        kind: [(e.rank, e.begin, e.end) for e in timeline.events if e.instruction.kind is kind]
        for kind in (Kind.REDUCE_GRADIENTS, Kind.SHARE_LOSS)
    }
    assert when[Kind.REDUCE_GRADIENTS] == [(0, 3.0, 7.0), (2, 3.0, 7.0)]
    assert when[Kind.SHARE_LOSS] == [(0, 3.0, 4.0), (1, 3.0, 4.0), (2, 3.0, 4.0)]
    assert timeline.bubble == pytest.approx([6 / 7, 5 / 7, 4 / 7])


def test_sums_of_a_rank_run_one_after_the_other_beside_its_compute() -> None:
    lines = "FORWARD stage 0 mb 0;REDUCE_GRADIENTS a ranks 0;REDUCE_GRADIENTS b ranks 0"
    lists = [parse(f"{lines};FORWARD stage 0 mb 1".replace(";", "\n"))]
    cost = StageCost(1.0, 0, 0, 0)
    timeline = simulate(lists, [0], [cost], {}, collective_seconds=lambda _: 4.0)
    spans = sorted((e.begin, e.end) for e in timeline.events)
    assert spans == [(0, 1), (1, 2), (1, 5), (5, 9)]
    assert timeline.step_time == 9.0


def test_a_sum_that_some_of_its_ranks_never_reach_is_found() -> None:
    lists = [parse("REDUCE_GRADIENTS a ranks 0,1"), parse("FORWARD stage 0 mb 0")]
    with pytest.raises(PlanError, match="rank 0 at REDUCE_GRADIENTS a ranks 0,1: waits for rank 1"):
        simulate(lists, [1], [StageCost(1.0, 0, 0, 0)], {})


def test_buffers_live_as_long_as_they_are_needed() -> None:
    lists = [
        "FORWARD stage 0 mb 0;SEND x mb 0 to 1;RECV x.grad mb 0 from 1;BACKWARD stage 0 mb 0",
        "RECV x mb 0 from 0;FORWARD stage 1 mb 0;BACKWARD stage 1 mb 0;SEND x.grad mb 0 to 0",
    ]
    costs = [StageCost(1, 2, 1000, 100), StageCost(1, 2, 2000, 200)]
    timeline = run(lists, costs, {"x": 4}, lambda value, source, target: 0.5)
    # Forwards 0-1 and 1.5-2.5, backwards 2.5-4.5 and 5-7; messages 1-1.5 and 4.5-5.
    assert timeline.memory == (
        ((0.0, 1100), (1.0, 1108), (1.5, 1104), (7.0, 1000)),
        ((0.0, 2004), (1.5, 2204), (4.5, 2004), (5.0, 2000)),
    )
    assert timeline.peak_memory == (1108, 2204)


def test_a_tensor_sent_to_two_ranks_is_held_once_until_the_last_has_it() -> None:
    lists = [
        "FORWARD stage 0 mb 0;SEND x mb 0 to 1;SEND x mb 0 to 2",
        "RECV x mb 0 from 0;FORWARD stage 1 mb 0",
        "RECV x mb 0 from 0;FORWARD stage 2 mb 0",
    ]
    costs = [StageCost(1, 1, 0, 0)] * 3
    timeline = run(lists, costs, {"x": 4}, lambda value, source, target: float(target))
    assert timeline.memory[0] == ((0.0, 0), (1.0, 4), (3.0, 0))


def test_resident_memory_of_all_stages_on_a_rank_adds_up() -> None:
    costs = [StageCost(1, 1, size, 0) for size in (1, 10, 100)]
    timeline = simulate([(), ()], [0, 1, 0], costs, {})
    assert timeline.peak_memory == (101, 10)
    assert timeline.step_time == 0.0
    assert timeline.bubble == (0.0, 0.0)


# Several stages on a rank, values that skip stages


def two_stages_a_rank() -> Lowered:
    """Stages 0 to 3 on ranks 0, 1, 0, 1; stage 0 gives `skip` to stages 1 and 3, both on rank 1."""
    stages, values = chain((0, 1, 0, 1))
    stages = (
        dataclasses.replace(stages[0], gives=("v0", "skip")),
        dataclasses.replace(stages[1], receives=("v0", "skip")),
        stages[2],
        dataclasses.replace(stages[3], receives=("v2", "skip")),
    )
    values["skip"] = value("skip", 0, 1, 3)
    orders = [
        [forward(r, 0), forward(r + 2, 0), backward(r + 2, 0), backward(r, 0)] for r in (0, 1)
    ]
    return lowered(orders, stages, values, 1)


def test_each_stage_waits_for_its_own_messages_only() -> None:
    program = two_stages_a_rank()
    timeline = simulate_lowered(program, [ONE] * 4)
    assert timeline.step_time == 4 * (F + B)
    assert begins(timeline)["BACKWARD stage 1 mb 0"] == 4 * F + 2 * B
    received = [line for line in program.instructions[1] if line.kind is Kind.RECV]
    assert [line.value for line in received] == ["v0", "skip", "v2", "v1"]


def test_a_value_used_by_two_stages_is_held_until_the_last_backward() -> None:
    program = two_stages_a_rank()
    costs = [StageCost(F, B, 0, 0)] * 4
    sizes = {**dict.fromkeys(program.values, 0), "skip": 1}
    timeline = simulate(program.instructions, [0, 1, 0, 1], costs, sizes, stages=program.stages)
    assert timeline.memory[1] == ((0.0, 1), (4 * F + 3 * B, 0))


# Against a second simulation: sweep over all ranks until no arrival changes


def stupid(program: Lowered, costs: Sequence[StageCost], seconds: Mapping[str, float]) -> float:
    """The step time of a program with one stage per rank."""
    arrivals: dict[tuple[object, ...], float] = {}
    while True:
        found = dict(arrivals)
        ends = [_sweep(r, lines, costs[r], seconds, found) for r, lines in _ranked(program)]
        if found == arrivals:
            return max([*ends, *arrivals.values()])
        arrivals = found


def _ranked(program: Lowered) -> Iterator[tuple[int, Sequence[Instruction]]]:
    """Ranks with their lists."""
    yield from enumerate(program.instructions)


def _sweep(
    rank: int,
    lines: Sequence[Instruction],
    cost: StageCost,
    seconds: Mapping[str, float],
    arrivals: dict[tuple[object, ...], float],
) -> float:
    """When a rank's compute ends, by the arrivals known so far, where its sends are entered."""
    clock = 0.0
    link: dict[int | None, float] = {}
    for line in lines:
        if line.kind is Kind.SEND:
            assert line.value is not None
            link[line.peer] = max(clock, link.get(line.peer, 0.0)) + seconds[line.value]
            key = (rank, line.peer, line.value, line.gradient, line.microbatch)
            arrivals[key] = link[line.peer]
        elif line.kind in COMPUTE:
            backward = line.kind is Kind.BACKWARD
            needed = [
                arrivals.get((other.peer, rank, other.value, backward, line.microbatch), 0.0)
                for other in lines
                if other.kind is Kind.RECV
                and (other.microbatch, other.gradient) == (line.microbatch, backward)
            ]
            clock = max([clock, *needed]) + (cost.backward if backward else cost.forward)
    return clock


def uneven(name: str, p: int, m: int) -> tuple[Lowered, list[StageCost], dict[str, float]]:
    """A chain with costs and message times that differ everywhere."""
    draw = random.Random(f"{name} {p} {m}")
    costs = [StageCost(draw.uniform(1, 3), draw.uniform(1, 6), 10, 1) for _ in range(p)]
    program = lowered_chain(name, p, m)
    return program, costs, {v: draw.uniform(0, 4) for v in program.values}


def simulate_uneven(name: str, p: int, m: int) -> Timeline:
    """The simulated step of that chain."""
    program, costs, seconds = uneven(name, p, m)
    sizes = {v: item.nbytes for v, item in program.values.items()}
    return simulate(
        program.instructions, range(p), costs, sizes, lambda value, source, target: seconds[value]
    )


UNEVEN = [(name, p, m) for name in NAMES for p, m in ((1, 3), (2, 1), (3, 5), (4, 2), (5, 11))]


@pytest.mark.parametrize(("name", "p", "m"), UNEVEN)
def test_a_second_simulation_finds_the_same_step_time(name: str, p: int, m: int) -> None:
    assert simulate_uneven(name, p, m).step_time == stupid(*uneven(name, p, m))


@pytest.mark.parametrize(("name", "p", "m"), UNEVEN)
def test_one_thing_at_a_time_on_each_rank_and_on_each_link(name: str, p: int, m: int) -> None:
    lanes: dict[tuple[int, int | None], list[TimelineEvent]] = {}
    for event in simulate_uneven(name, p, m).events:
        peer = event.instruction.peer if event.instruction.kind is Kind.SEND else None
        lanes.setdefault((event.rank, peer), []).append(event)
    for events in lanes.values():
        assert all(a.end <= b.begin for a, b in pairwise(events))


@pytest.mark.parametrize(("name", "p", "m"), UNEVEN)
def test_every_compute_instruction_and_every_send_is_one_event(name: str, p: int, m: int) -> None:
    program, _, _ = uneven(name, p, m)
    lines = [str(i) for one in program.instructions for i in one if i.kind is not Kind.RECV]
    assert sorted(lines) == sorted(str(e.instruction) for e in simulate_uneven(name, p, m).events)


@pytest.mark.parametrize(("name", "p", "m"), UNEVEN)
def test_a_chain_of_events_lasts_the_whole_step_without_a_gap(name: str, p: int, m: int) -> None:
    assert unbroken(simulate_uneven(name, p, m))


@pytest.mark.parametrize(("name", "p", "m"), UNEVEN)
def test_memory_returns_to_what_is_resident(name: str, p: int, m: int) -> None:
    timeline = simulate_uneven(name, p, m)
    for levels, peak in zip(timeline.memory, timeline.peak_memory, strict=True):
        assert levels[-1][1] == 10
        assert min(size for _, size in levels) >= 10
        assert max(size for _, size in levels) == peak


def test_with_one_stage_per_rank_the_wiring_says_nothing_new() -> None:
    program, costs, _ = uneven("1f1b", 4, 6)
    sizes = {v: item.nbytes for v, item in program.values.items()}
    bare = simulate(program.instructions, range(4), costs, sizes, lambda *_: 0.25)
    assert simulate_lowered(program, costs, lambda *_: 0.25) == bare


def test_the_same_program_gives_the_same_timeline() -> None:
    assert simulate_uneven("1f1b", 4, 6) == simulate_uneven("1f1b", 4, 6)
    assert str(simulate_uneven("1f1b", 4, 6)) == str(simulate_uneven("1f1b", 4, 6))


# What it prints, what it refuses


def test_a_timeline_prints_numbers_and_a_drawing() -> None:
    costs = [StageCost(1, 1, 3 * 2**30, 2**29)] * 2
    timeline = simulate_lowered(lowered_chain("1f1b", 2, 3), costs)
    assert str(timeline) == (
        "step 8 s, 25.0 % idle, at most 4 GiB on a rank\n"
        "rank 0   25.0 %        4 GiB  "
        "F0------F1------........B0------F2------B1------........B2------\n"
        "rank 1   25.0 %      3.5 GiB  "
        "........F0------B0------F1------B1------F2------B2------........"
    )


def test_a_deadlock_names_the_instructions_that_wait() -> None:
    lists = [list(one) for one in lowered_chain("gpipe", 2, 2).instructions]
    texts = [str(line) for line in lists[0]]
    receive, backward = (
        lists[0][texts.index(text)]
        for text in ("RECV v0.grad mb 0 from 1", "BACKWARD stage 0 mb 0")
    )
    rest = [line for line in lists[0] if line not in (receive, backward)]
    first = [str(line) for line in rest].index("FORWARD stage 0 mb 1")
    lists[0] = [*rest[:first], receive, backward, *rest[first:]]
    with pytest.raises(PlanError) as caught:
        simulate(lists, [0, 1], [ONE, ONE], {"v0": 4})
    assert str(caught.value).splitlines() == [
        "the program never ends: 2 of its 2 ranks wait (check the order of these instructions)",
        "  * rank 0 at BACKWARD stage 0 mb 0: waits for v0.grad mb 0 from rank 1",
        "  * rank 1 at FORWARD stage 1 mb 1: waits for v0 mb 1 from rank 0",
    ]


def test_a_backward_before_its_forward_is_refused() -> None:
    with pytest.raises(PlanError, match="rank 0 at BACKWARD stage 0 mb 0: its FORWARD does not"):
        run(["BACKWARD stage 0 mb 0;FORWARD stage 0 mb 0"], [ONE])


def test_a_collective_that_not_all_ranks_reach_is_a_deadlock() -> None:
    lists = ["SHARE_LOSS from 1", "FORWARD stage 1 mb 0", "SHARE_LOSS from 1"]
    with pytest.raises(PlanError, match="rank 2 at SHARE_LOSS from 1: waits for rank 1"):
        run(lists, [ONE] * 3)


def test_every_stage_needs_a_cost() -> None:
    with pytest.raises(InputError, match=r"every stage needs a cost \(2 stages, 1 costs\)"):
        simulate([(), ()], [0, 1], [ONE], {})
