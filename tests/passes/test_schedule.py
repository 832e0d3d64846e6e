"""The schedule pass: the fastest that fits, by simulation; and the search that starts from it."""

import dataclasses
import math
from functools import cache
from typing import Any

import pytest
import torch

import parcompiler as pc
from parcompiler.device import device
from parcompiler.models import gpt
from parcompiler.passes import even
from parcompiler.passes.decide import start
from parcompiler.passes.estimate import alone, estimate
from parcompiler.passes.even import SOON_FULL, even_step, shared_step
from parcompiler.passes.schedule import CANDIDATES, SchedulePass
from parcompiler.passes.shard.local import local
from parcompiler.passes.stage import StagePass
from parcompiler.problem import Problem
from parcompiler.schedules import V, build
from parcompiler.schedules.planned import planned
from parcompiler.schedules.staleness import waiting
from parcompiler.timeline import step_time
from tests import zoo


@cache
def captured() -> pc.Program:
    model, inputs = zoo.build("gpt")
    return pc.compile(model, pc.Mesh(), inputs, microbatches=1)


def compiled(pipeline: int = 2, **options: Any) -> pc.Program:
    return pc.compile(captured(), pc.Mesh(pipeline=pipeline), **options)


def roomy(memory: int) -> pc.Mesh:
    sized = dataclasses.replace(device("cpu"), name="sized", memory=memory)
    return pc.Mesh(pipeline=2, device=sized)


@pytest.mark.parametrize("pipeline", [2, 4])
def test_auto_is_the_fastest_in_simulation(pipeline: int) -> None:
    chosen = compiled(pipeline, microbatches=6)
    seconds = {
        name: compiled(pipeline, schedule=name, microbatches=6).simulate().step_time
        for name in CANDIDATES
    }
    assert chosen.plan.schedule in CANDIDATES
    assert chosen.simulate().step_time <= min(seconds.values()) / (1 - 0.01)
    weighed = {item.schedule: item.seconds for item in chosen.plan.weighed or () if item.seconds}
    assert weighed == pytest.approx({name: seconds[name] for name in weighed}, rel=1e-9)
    assert chosen.plan.schedule in str(chosen.report())


@pytest.mark.parametrize("name", CANDIDATES)
def test_the_estimate_is_what_the_simulator_says(name: str) -> None:
    program = compiled(schedule=name, microbatches=5)
    found = estimate(program.problem, program.plan).step_time
    assert found == pytest.approx(program.simulate().step_time, rel=1e-9)


def test_auto_takes_only_what_fits() -> None:
    """Where memory is short, those that keep much in flight lose, and the report says why."""
    peaks = {
        name: max(compiled(schedule=name, microbatches=8).simulate().peak_memory)
        for name in CANDIDATES
    }
    room = (min(peaks.values()) + max(peaks.values())) // 2
    program = pc.compile(captured(), roomy(room), microbatches=8, recompute="none")
    lost = [item.reason or "" for item in program.plan.weighed or () if item.seconds is None]
    assert any("memory limit" in reason for reason in lost)
    assert all("memory limit" in reason or "even stages" in reason for reason in lost)
    assert max(program.simulate().peak_memory) <= room
    assert "memory limit" in program.report().to_text(300)


@pytest.mark.parametrize("recompute", ["none", "auto"])
@pytest.mark.parametrize("name", CANDIDATES)
def test_no_schedule_is_faster_than_its_even_stages(name: str, recompute: str) -> None:
    """Else one that was not divided might have been the fastest."""
    room = max(compiled(schedule=name, microbatches=8, recompute="none").simulate().peak_memory)
    for memory in (2 * room, room, 7 * room // 8):
        given: dict[str, Any] = {"schedule": name, "microbatches": 8, "recompute": recompute}
        try:
            program = pc.compile(captured(), roomy(memory), vocabulary="whole", **given)
        except pc.InfeasibleError:
            continue
        assert even_step(program.problem, program.plan) <= program.simulate().step_time


@pytest.mark.parametrize("vocabulary", ["vocab-2", "vocab-1", "interlaced"])
@pytest.mark.parametrize("name", CANDIDATES)
def test_nor_than_they_are_with_the_passes_of_a_head_on_all_ranks(
    name: str, vocabulary: str
) -> None:
    program = compiled(schedule=name, microbatches=8, vocabulary=vocabulary)
    problem, plan = local(program.problem, program.plan), program.plan
    step = program.simulate().step_time
    assert even_step(problem, plan) <= shared_step(problem, plan) <= step
    few = dataclasses.replace(plan, microbatches=7)  # of which uneven stages may gain
    assert shared_step(problem, few) == even_step(problem, few)


def test_the_passes_of_a_head_are_waited_for_in_deep_pipelines() -> None:
    """More than uneven stages may gain."""
    program = compiled(4, schedule="zb-v", microbatches=16, vocabulary="vocab-2")
    problem, plan = local(program.problem, program.plan), program.plan
    assert shared_step(problem, plan) > 1.01 * even_step(problem, plan)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_they_are_waited_for_as_long_as_micro_batches_come(name: str) -> None:
    program = compiled(4, schedule=name, microbatches=64, vocabulary="vocab-2")
    step = program.simulate().step_time
    least = shared_step(local(program.problem, program.plan), program.plan)
    assert 0.97 * step < least <= step


@pytest.mark.parametrize("name", CANDIDATES)
def test_two_small_pipelines_tell_the_step_of_a_deep_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, known = 38, captured().problem
    options = dataclasses.replace(known.options, microbatches=3 * ranks)
    mesh = pc.Mesh(pipeline=ranks, data=8, device="h100")  # all neighbours are on other nodes
    problem = known.anew(mesh=mesh, options=options)
    stages = 2 if name in ("interleaved", *V) else 1
    plan = dataclasses.replace(start(problem), schedule=name, virtual_stages=stages)
    priced = problem.priced(problem.levels[0])
    lengths = []

    def timed(at: Any, microbatches: int, costs: Any, messages: Any) -> float:
        lengths.append(len(costs) // stages)
        return step_time(at, microbatches, costs, messages)

    monkeypatch.setattr(even, "step_time", timed)
    told = even._step(problem, plan, priced, ranks)
    monkeypatch.setattr(even, "SMALL", ranks)
    simulated = even._step(problem, plan, priced, ranks)
    assert lengths == [14, 26, 38]
    is_irregular = name in ("v-half", "v-min")
    assert told == pytest.approx(simulated, rel=0.015 if is_irregular else 1e-9)
    assert told <= simulated * (1 + 1e-9)


def test_divisions_that_are_no_faster_than_a_known_step_are_refused() -> None:
    program = compiled(schedule="1f1b", microbatches=8)
    problem = dataclasses.replace(local(program.problem, program.plan), explain=False)
    begun = dataclasses.replace(program.plan, stages=None)
    step = estimate(problem, program.plan).step_time
    with pytest.raises(pc.InfeasibleError, match="no division was found"):
        StagePass(below=step).run(problem, begun)
    assert StagePass(below=1.001 * step).run(problem, begun).stages == program.plan.stages


def test_schedules_that_no_level_of_zero_makes_fast_enough_are_not_divided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = compiled(microbatches=8)
    problem = dataclasses.replace(local(program.problem, program.plan), explain=False)
    begun = dataclasses.replace(start(problem), vocabulary=program.plan.vocabulary)
    divided = list[str | None]()
    run = StagePass.run

    def noted(self: StagePass, problem: Problem, plan: pc.Plan) -> pc.Plan:
        divided.append(plan.schedule)
        return run(self, problem, plan)

    monkeypatch.setattr(StagePass, "run", noted)

    def floor(plan: pc.Plan, enough: float) -> float:
        return 0.0 if plan.schedule == "gpipe" else enough

    below = 2 * program.simulate().step_time
    assert SchedulePass(below=below, floor=floor).run(problem, begun).schedule == "gpipe"
    assert set(divided) == {"gpipe"}


@pytest.mark.parametrize("name", SOON_FULL)
@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 12])
def test_about_one_micro_batch_for_each_rank_holds_and_leaves_as_much_as_more(
    name: str, ranks: int
) -> None:
    few = build(name, ranks, ranks + SOON_FULL[name])
    for more in (0, 1, ranks - 1):
        many = build(name, ranks, 4 * ranks + more)
        assert list(map(few.held, range(ranks))) == list(map(many.held, range(ranks)))
        for stage, rank in enumerate(few.placement):
            assert waiting(few.orders[rank], stage) == waiting(many.orders[rank], stage)


@pytest.mark.parametrize("vocabulary", ["whole", "vocab-2", "vocab-1"])
@pytest.mark.parametrize("name", CANDIDATES)
def test_stages_alone_take_no_longer_than_with_a_vocabulary_on_all_ranks(
    name: str, vocabulary: str
) -> None:
    program = compiled(schedule=name, microbatches=6, vocabulary=vocabulary)
    problem, plan = local(program.problem, program.plan), program.plan
    step, least = estimate(problem, plan).step_time, alone(problem, plan)
    if vocabulary == "whole":
        assert least == step
    else:
        assert least < step


def test_more_stages_on_a_rank_are_weighed_where_micro_batches_are_few() -> None:
    """Two of them were 4 % slower, under the schedule that is fastest with two."""
    config = gpt.Config(layers=14, heads=8, hidden=1024, vocabulary=512, sequence=512)
    with torch.device("meta"):
        model = gpt.GPT(config)
    tokens = torch.zeros(1, config.sequence, dtype=torch.long)

    def taken(microbatches: int, **options: Any) -> pc.Program:
        mesh, inputs = pc.Mesh(4, device="h100"), (tokens, tokens)
        return pc.compile(model, mesh, inputs, microbatches=microbatches, **options)

    few = taken(4)
    assert (few.plan.schedule, few.plan.virtual_stages) == ("interleaved", 4)
    two = taken(4, virtual_stages=2)
    assert few.simulate().step_time < 0.97 * two.simulate().step_time
    assert all(item.virtual_stages <= 2 for item in taken(400).plan.weighed or ())


def test_schedules_are_divided_where_all_bounds_say_that_nothing_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are of whole layers, and pieces of them may fit."""
    wanted = compiled(microbatches=6, vocabulary="whole").simulate().step_time
    monkeypatch.setattr("parcompiler.passes.schedule.even_step", lambda *_: math.inf)
    found = compiled(microbatches=6, vocabulary="whole")
    assert found.simulate().step_time == pytest.approx(wanted, rel=0.01)
    assert all(item.seconds for item in found.plan.weighed or ())


def test_other_schedules_are_divided_where_the_most_promising_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even stages favour it, and its own do not fit in the end."""
    stages = StagePass.run

    def run(self: StagePass, problem: Problem, plan: pc.Plan) -> pc.Plan:
        if plan.schedule == "gpipe":
            message = "messages on their way take too much"
            raise pc.InfeasibleError(message)
        return stages(self, problem, plan)

    monkeypatch.setattr(StagePass, "run", run)
    favoured = {"gpipe": 1e-9}
    monkeypatch.setattr(
        "parcompiler.passes.schedule.even_step",
        lambda _, plan: favoured.get(plan.schedule or "", 1e-8),
    )
    found = compiled(microbatches=6, vocabulary="whole")
    assert found.plan.schedule != "gpipe"
    reasons = {item.schedule: item.reason for item in found.plan.weighed or ()}
    assert reasons["gpipe"] == "messages on their way take too much"


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_even_stages_give_a_slow_device_less(name: str) -> None:
    slow = dataclasses.replace(device("cpu"), name="cpu-slow", memory_bandwidth=1e9)
    mesh = pc.Mesh(pipeline=2, device=("cpu", slow))
    given: dict[str, Any] = {"schedule": name, "microbatches": 8, "vocabulary": "whole"}
    program = pc.compile(captured(), mesh, **given)
    least = even_step(program.problem, program.plan)
    alike = compiled(**given)
    assert even_step(alike.problem, alike.plan) < least <= program.simulate().step_time


def test_even_stages_that_do_not_fit_take_for_ever() -> None:
    program = compiled(schedule="gpipe", microbatches=8, recompute="none", vocabulary="whole")
    small = dataclasses.replace(program.problem, mesh=roomy(program.problem.held_batch_bytes + 1))
    assert even_step(small, program.plan) == math.inf


def test_stages_on_a_rank_are_a_wish() -> None:
    program = compiled(virtual_stages=3, microbatches=4)
    assert program.plan.schedule == "interleaved"
    assert [choice.rank for choice in program.plan.stages or ()] == [0, 1, 0, 1, 0, 1]
    assert compiled(schedule="interleaved", microbatches=4).plan.virtual_stages == 2


def test_counts_say_how_many_stages_a_rank_has() -> None:
    program = compiled(stages=(2, 1, 1, 2), microbatches=4)
    assert [len(choice.blocks) for choice in program.plan.stages or ()] == [2, 1, 1, 2]
    assert program.plan.virtual_stages == 2


def test_too_few_blocks_for_two_stages_on_a_rank() -> None:
    with pytest.raises(pc.InfeasibleError, match=r"more stages than blocks.*stages"):
        compiled(16, schedule="zb-v", microbatches=4)


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "message"),
    [
        ("1f1b", 2, "1f1b has one stage on each rank"),
        ("zb-v", 3, "zb-v always has 2 stages on each rank"),
    ],
)
def test_stages_that_a_schedule_cannot_have_are_refused(
    schedule: str, virtual_stages: int, message: str
) -> None:
    with pytest.raises(pc.InputError, match=message):
        compiled(schedule=schedule, virtual_stages=virtual_stages)


def test_a_search_is_never_slower_than_the_best_by_name() -> None:
    best = compiled(3, microbatches=5)
    found = compiled(3, microbatches=5, schedule="search")
    assert found.plan.schedule == "search"
    assert found.plan.search is not None
    step = found.simulate().step_time
    assert step == pytest.approx(found.plan.search.objective, rel=1e-9)
    assert found.plan.search.bound <= step <= best.simulate().step_time * (1 + 1e-9)
    assert planned(found.plan) != build("1f1b", 3, 5)
    assert "search" in str(found.report())
    assert pc.Plan.from_json(found.plan.to_json()) == found.plan


def test_a_search_is_the_same_every_time() -> None:
    given: dict[str, Any] = {"microbatches": 4, "schedule": "search", "passes": zoo.SHORT}
    plans = {compiled(**given).plan.to_json() for _ in range(2)}
    assert len(plans) == 1


def test_a_searched_order_trains_as_the_model_does() -> None:
    found = compiled(2, microbatches=3, schedule="search", passes=zoo.SHORT).verify()
    assert found.ok, str(found)
    assert found.native.bitwise
