"""The stage pass: which granularity, which division, and memory by what is in flight."""

import dataclasses
import math
import re

import pytest
import torch
from torch import nn

import parcompiler as pc
from parcompiler.device import device
from parcompiler.models import gpt
from parcompiler.options import Options
from parcompiler.passes import SchedulePass, StagePass
from parcompiler.passes.divide import evaluate
from parcompiler.passes.loads import data
from parcompiler.plan import Plan, Shape
from parcompiler.problem import Problem
from tests import zoo
from tests.passes.handmade import VALUE, chain, plain, small

ONCE = (((1,),),)  # one micro-batch in flight on a rank with one stage


def planned(problem: Problem, stage: StagePass | None = None) -> Plan:
    """The plan after both passes."""
    mesh = problem.mesh
    start = Plan("Handmade", "", Shape(mesh.pipeline), problem.options.microbatches)
    decided = SchedulePass().run(problem, start)
    return (stage or StagePass()).run(problem, decided)


def counts(plan: Plan) -> list[int]:
    return [len(choice.blocks) for choice in plan.stages or ()]


def test_the_slowest_stage_is_as_fast_as_it_can_be() -> None:
    plan = planned(chain([1.0, 3, 1, 1, 1, 1, 4], stages=3))
    assert counts(plan) == [2, 4, 1]
    assert [choice.rank for choice in plan.stages or ()] == [0, 1, 2]
    assert plan.solution is not None
    assert plan.solution.status == "optimal"
    assert plan.solution.objective == pytest.approx(12 + 3 * 4)
    assert plan.solution.bound == plan.solution.objective


def test_a_wish_is_kept_and_one_rank_needs_no_choice() -> None:
    wish = Options(microbatches=4, schedule="naive")
    assert planned(chain([1.0] * 4, options=wish)).schedule == "naive"
    alone = planned(chain([1.0] * 4, stages=1, options=Options(microbatches=4)))
    assert alone.schedule == "1f1b"
    assert [item.schedule for item in alone.weighed or ()] == ["1f1b"]


def test_whole_layers_are_kept_where_they_are_good_enough() -> None:
    plan = planned(chain([1.0] * 6, stages=2))
    assert plan.granularity == 1
    assert counts(plan) == [3, 3]


def test_layers_are_cut_where_that_shortens_the_step() -> None:
    plan = planned(chain([0.1, 4, 4, 4, 0.1], stages=2))
    assert plan.granularity == 2
    assert counts(plan) == [4, 4]


def test_layers_are_cut_where_there_are_too_few_for_the_stages() -> None:
    plan = planned(chain([1.0, 4, 4, 1], stages=5))
    assert plan.granularity == 2
    assert len(plan.stages or ()) == 5


def test_slack_and_gain_say_how_much_finer_blocks_must_save() -> None:
    problem = chain([0.1, 4, 4, 4, 0.1], stages=2)
    assert planned(problem, StagePass(slack=math.inf)).granularity == 1
    assert planned(problem, StagePass(gain=0.5)).granularity == 1
    assert planned(problem, StagePass(slack=0.0, gain=0.0)).granularity == 2


def test_more_stages_than_pieces_are_refused() -> None:
    with pytest.raises(pc.InfeasibleError, match=r"more stages than blocks \(7 > 6\)"):
        planned(chain([1.0, 4, 4, 1], stages=7))


def test_a_plan_is_the_same_every_time() -> None:
    plans = [planned(chain([1.0, 2, 2, 2, 2, 1], stages=3)).to_json() for _ in range(3)]
    assert len(set(plans)) == 1


def test_neither_problem_nor_plan_is_changed() -> None:
    problem = chain([1.0] * 5)
    start = Plan("Handmade", "", Shape(2), 4, schedule="gpipe")
    StagePass().run(problem, start)
    assert start == Plan("Handmade", "", Shape(2), 4, schedule="gpipe")
    assert problem.priced(1) is problem.cache.priced[1, frozenset(), False, False, False]


def test_a_slow_link_is_crossed_by_as_few_values_as_can_be() -> None:
    """The best cut by seconds alone, after layers.1, would carry two values."""
    skips = [(1, 3), (1, 4), (2, 4)]
    seconds = [1.0, 1, 1, 1, 1, 1.5]
    layers_only = StagePass(slack=math.inf)
    fast = planned(chain(seconds, skips=skips), layers_only)
    slow = planned(chain(seconds, skips=skips, on=small(latency=3.0)), layers_only)
    assert counts(fast) == [3, 3]
    assert counts(slow) == [5, 1]


def test_a_value_is_received_once_on_each_stage_that_uses_it() -> None:
    problem = chain([1.0] * 6, skips=[(1, 3), (1, 4), (1, 5)], stages=3, on=small(latency=0.25))
    loads, flows = data(problem, 1)
    from_layer = next(flow for flow in flows if flow.producer == 1)
    assert from_layer.consumers == (2, 3, 4, 5)
    assert (from_layer.seconds, from_layer.saved) == (0.25, VALUE)
    found = evaluate(loads, flows, (0, 0, 1, 1, 2, 2), (0, 1, 2), 1, ONCE * 3)
    # stage 2 receives the value before it and the one that skips, each once
    assert found.seconds == pytest.approx((2.0, 2.25, 2.5))
    # a receive is posted before the value of the micro-batch before is used up
    assert found.memory == tuple(2 * VALUE * n + 2 * 32 for n in (0, 1, 2))


def test_a_shared_tensor_is_held_once_on_each_stage() -> None:
    problem = chain([1.0] * 4, elements=[1000, 2, 2, 2], shared=[0, 3])
    loads, flows = data(problem, 1)
    assert loads[0].shared == loads[3].shared == (("embedding.weight", 16_000),)
    together = evaluate(loads, flows, (0, 0, 0, 0), (0,), 1, ONCE).memory[0]
    apart = evaluate(loads, flows, (0, 0, 1, 1), (0, 1), 1, ONCE * 2).memory
    assert together == 16_000 + 3 * 32
    assert apart == (16_000 + 32, 16_000 + 2 * 32 + 2 * VALUE)


def least(problem: Problem) -> int:
    """The least memory that the pass says would do."""
    tiny = dataclasses.replace(problem, mesh=dataclasses.replace(problem.mesh, device=small(1)))
    tiny.__dict__["levels"] = range(1, 3)
    with pytest.raises(pc.InfeasibleError) as caught:
        planned(tiny)
    found = re.search(r"the least that would do is ([\d,]+) bytes", str(caught.value))
    assert found is not None
    return int(found[1].replace(",", ""))


def with_memory(problem: Problem, memory: int) -> Problem:
    sized = dataclasses.replace(
        problem, mesh=dataclasses.replace(problem.mesh, device=small(memory))
    )
    sized.__dict__["levels"] = range(1, 3)
    return sized


def test_schedules_need_memory_by_what_they_keep_in_flight() -> None:
    """On a device sized in between, 1F1B fits and GPipe does not."""
    problems = {
        name: chain(
            [1.0] * 6,
            saved=[1000] * 6,
            stages=2,
            options=Options(microbatches=8, schedule=name, recompute="none"),
        )
        for name in ("naive", "1f1b", "gpipe")
    }
    needs = {name: least(problem) for name, problem in problems.items()}
    assert needs["naive"] < needs["1f1b"] < needs["gpipe"]
    between = (needs["1f1b"] + needs["gpipe"]) // 2
    assert planned(with_memory(problems["1f1b"], between)).stages
    with pytest.raises(pc.InfeasibleError, match="activations of 8 micro-batches in flight"):
        planned(with_memory(problems["gpipe"], between))
    for name, problem in problems.items():
        assert planned(with_memory(problem, needs[name])).stages
        with pytest.raises(pc.InfeasibleError):
            planned(with_memory(problem, needs[name] // 2))


def test_the_first_stage_of_1f1b_gets_fewer_blocks_when_memory_is_short() -> None:
    """It keeps two micro-batches, the last keeps one."""
    problem = chain([1.0] * 6, saved=[1000] * 6, options=plain(8))
    assert counts(planned(problem)) == [3, 3]
    short = planned(with_memory(problem, least(problem)))
    assert short.stages is not None
    first, last = (sum(block != "" for block in choice.blocks) for choice in short.stages)
    assert first < last


def test_a_given_division_is_priced_but_not_improved() -> None:
    options = Options(microbatches=4, schedule="1f1b", stages=(1, 4))
    plan = planned(chain([1.0] * 5, options=options))
    assert counts(plan) == [1, 4]
    assert plan.solution is not None
    assert plan.solution.status == "given"
    assert plan.solution.objective == pytest.approx(5 + 3 * 4)


def test_a_given_division_must_fit_into_the_memory() -> None:
    options = Options(microbatches=4, schedule="1f1b", stages="even", recompute="none")
    problem = chain([1.0] * 6, elements=[1000, 2, 2, 2, 2, 2], on=small(10_000), options=options)
    message = (
        "rank 0 of this division needs 16,464 bytes, small has 10,000, 6,464 less; the largest"
    )
    with pytest.raises(
        pc.InfeasibleError, match=f"{message} part is parameters and optimizer states.*embed"
    ):
        planned(problem)


# Models


class Hourglass(nn.Module):
    """Layers down and up again, with skips between their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.down:
            x = layer(x).relu()
            kept.append(x)
        for layer in self.up:
            x = layer(x + kept.pop()).relu()
        return x.square().mean()


def test_skips_are_flows_from_their_maker_to_all_their_users() -> None:
    program = pc.compile(Hourglass(), pc.Mesh(pipeline=3), (torch.ones(2, 8),), microbatches=2)
    _, flows = data(program.problem, 1)
    assert {flow.producer: flow.consumers for flow in flows} == {
        0: (1, 4), 1: (2, 3), 2: (3,), 3: (4,), 4: (5,)
    }  # fmt: skip
    assert program.verify().ok


@pytest.mark.parametrize("pipeline", [2, 3, 4])
def test_an_encoder_and_a_decoder_are_divided_in_order(pipeline: int) -> None:
    model, inputs = zoo.build("t5")
    program = pc.compile(model, pc.Mesh(pipeline=pipeline), inputs, microbatches=2)
    plan = program.plan
    assert plan.granularity is not None
    assert plan.stages is not None
    cut = program.problem.priced(plan.granularity).cut
    order = [block.name for block in cut.blocks]
    home = {name: j for j, choice in enumerate(plan.stages) for name in choice.blocks}
    assert sorted(home, key=order.index) == order
    for flow in data(program.problem, plan.granularity)[1]:
        assert all(home[order[flow.producer]] <= home[order[q]] for q in flow.consumers)
    assert any(len(flow.consumers) > 1 for flow in data(program.problem, plan.granularity)[1])


def test_a_deep_mesh_cuts_the_layers_of_a_real_model() -> None:
    model, inputs = zoo.build("gpt")
    first = pc.compile(model, pc.Mesh(pipeline=2), inputs)
    deep = pc.compile(first, pc.Mesh(pipeline=8), schedule="1f1b")
    assert (deep.plan.granularity or 0) > 1
    assert len(deep.plan.stages or ()) == 8


def test_a_model_fits_under_1f1b_where_it_does_not_under_gpipe() -> None:
    model, inputs = zoo.build("gpt")
    first = pc.compile(model, pc.Mesh(pipeline=2), inputs)

    def need(schedule: str) -> int:
        tiny = dataclasses.replace(device("cpu"), name="tiny", memory=1)
        with pytest.raises(pc.InfeasibleError) as caught:
            pc.compile(
                first,
                pc.Mesh(pipeline=2, device=tiny),
                schedule=schedule,
                microbatches=16,
                recompute="none",
            )
        found = re.search(r"the least that would do is ([\d,]+) bytes", str(caught.value))
        assert found is not None
        return int(found[1].replace(",", ""))

    memory = (need("1f1b") + need("gpipe")) // 2
    between = dataclasses.replace(device("cpu"), name="between", memory=memory)
    mesh = pc.Mesh(pipeline=2, device=between)
    plan = pc.compile(first, mesh, schedule="1f1b", microbatches=16).plan
    assert plan.stages
    assert not plan.recompute
    with pytest.raises(pc.InfeasibleError):
        pc.compile(first, mesh, schedule="gpipe", microbatches=16, recompute="none")
    assert pc.compile(first, mesh, schedule="gpipe", microbatches=16).plan.recompute


def test_stages_leave_room_for_the_exchange_of_data_ranks() -> None:
    """Divisions were compared without it, and even stages were faster than the ones chosen."""
    fast = device("h100")
    slow = dataclasses.replace(fast, link=fast.link.at(0.01), network=fast.network.at(0.01))
    with torch.device("meta"):
        config = gpt.Config(
            layers=5, heads=4, hidden=512, vocabulary=32768, sequence=64, tied=False
        )
        model, tokens = gpt.GPT(config), torch.zeros(1, 64, dtype=torch.long)
    steps = {
        stages: pc.compile(
            model, pc.Mesh(2, data=2, device=slow), (tokens, tokens), microbatches=4, zero=0,
            schedule="1f1b", vocabulary="vocab-2", stages=stages, progress=False,
        ).simulate().step_time
        for stages in ("auto", "even")
    }  # fmt: skip
    assert steps["auto"] < 0.98 * steps["even"]
