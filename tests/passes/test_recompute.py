"""What is recomputed: by words, by patterns, by what memory forces; and what it costs."""

import contextlib
import dataclasses
import re
from collections.abc import Mapping
from functools import cache

import pytest
import torch
from torch import nn

import parcompiler as pc
from parcompiler.capture import capture
from parcompiler.capture.clean import simplify
from parcompiler.cost import BlockCost
from parcompiler.device import Link, device
from parcompiler.graph import Graph
from parcompiler.lower import lower
from parcompiler.models import gpt
from parcompiler.options import Options
from parcompiler.passes import DEFAULT
from parcompiler.passes.decide import start
from parcompiler.passes.estimate import costs, estimate
from parcompiler.passes.least import least_step
from parcompiler.passes.recompute import chosen
from parcompiler.plan import Plan, Shape
from parcompiler.priced import Priced
from parcompiler.prices import message_seconds, simulate_lowered, stage_costs
from parcompiler.problem import Problem
from parcompiler.schedules import SCHEDULES
from tests import zoo
from tests.passes.handmade import VALUE, chain, small

LAYERS = tuple(f"layers.{i}" for i in range(4))


@cache
def graph_of(name: str) -> Graph:
    return simplify(capture(*zoo.build(name)))


def problem_of(
    name: str = "gpt",
    recompute: str | Mapping[str, bool] = "full",
    *,
    memory: int | None = None,
    schedule: str = "1f1b",
    stages: str = "even",
) -> Problem:
    hardware = device("cpu")
    if memory is not None:
        hardware = dataclasses.replace(hardware, name="small", memory=memory)
    options = Options(4, schedule=schedule, stages=stages, recompute=recompute)
    return Problem(graph_of(name), pc.Mesh(pipeline=2, device=hardware), options)


def planned(problem: Problem) -> Plan:
    plan = Plan(problem.graph.name, "", Shape(problem.mesh.pipeline), problem.options.microbatches)
    for item in DEFAULT:
        plan = item.run(problem, plan)
    return plan


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("none", ()),
        ("full", ("embedding+positions", *LAYERS, "norm+head")),
        ({"layers.*": True}, LAYERS),
        ({"layers.[01]": True}, LAYERS[:2]),
        ({"*": True, "layers": False}, ("embedding+positions", "norm+head")),
        ({"layers.1": False, "*": True}, ("embedding+positions", *LAYERS, "norm+head")),
        ({"layers.*": False}, ()),
    ],
)
def test_words_and_patterns_choose_blocks(
    wanted: str | Mapping[str, bool], found: tuple[str, ...]
) -> None:
    assert planned(problem_of("gpt-dropout", wanted)).recompute == found


def test_a_pattern_holds_for_the_pieces_of_a_layer() -> None:
    assert chosen(problem_of(), 2, {"layers.1": True}) == ("layers.1.attention", "layers.1.ffn")
    assert chosen(problem_of(), 2, {"layers.1.ffn": True}) == ("layers.1.ffn",)
    plan = planned(problem_of(recompute={"layers.1.ffn": True}))  # whole layers have no such block
    assert (plan.granularity, plan.recompute) == (2, ("layers.1.ffn",))


def test_a_pattern_that_matches_no_block_is_refused_with_the_blocks() -> None:
    message = "the pattern 'layer.*' of recompute matches no block (embedding+positions, layers.0, "
    with pytest.raises(pc.InputError, match=re.escape(message)):
        planned(problem_of(recompute={"layers.0": True, "layer.*": True}))


class Noisy(nn.Module):
    """Layers with noise that is saved before it is drawn."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(8, 8), nn.RReLU(), nn.Linear(8, 8)) for _ in range(2))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("recompute", ["full", "offload"])
def test_what_is_saved_before_it_is_drawn_is_kept(recompute: str) -> None:
    mesh = pc.Mesh(pipeline=2, device="h100")
    program = pc.compile(Noisy(), mesh, (torch.randn(8, 8),), microbatches=2, recompute=recompute)
    assert program.plan.recompute == ()
    assert program.verify().ok


def test_running_statistics_are_updated_once() -> None:
    assert planned(problem_of("resnet", "full")).recompute == ("head",)
    message = "block 'stages.0' cannot be recomputed: it updates buffers (running statistics)"
    with pytest.raises(pc.InputError, match=re.escape(message)) as caught:
        planned(problem_of("resnet", {"stages.*": True}))
    assert "Exclude it: recompute={..., 'stages.0': False}" in str(caught.value)


def test_a_plan_says_what_is_recomputed_and_reads_back() -> None:
    plan = planned(problem_of(recompute={"layers.2": True}))
    assert plan.recompute == ("layers.2",)
    assert Plan.from_json(plan.to_json()) == plan


def handmade(seconds: float = 3.0) -> Priced:
    """Three blocks that keep 900 bytes each, and read the value before them."""
    priced = chain([seconds] * 3, saved=[900] * 3).priced(1)
    cost = BlockCost((), (), saved=900, saved_inputs=VALUE, output_bytes=VALUE,
                     estimated=(), kept_inputs=(0,), forward_peak=1000,
                     backward_peak=1500, gradient_bytes=600, deferred=950, unsaved_peak=700,
                     recompute_peak=1000)  # fmt: skip
    first = dataclasses.replace(cost, kept_inputs=())
    return dataclasses.replace(priced, costs=(first, cost, cost))


def test_a_recomputed_block_keeps_what_it_reads_and_runs_twice() -> None:
    priced = handmade()
    assert priced.saved == (900 + VALUE, 900 + VALUE, 900)
    assert (priced.forward, priced.backward) == ((1.0,) * 3, (2.0,) * 3)
    again = priced.recomputing(["layers.0", "head"])
    assert again.saved == (900 + VALUE, VALUE, 0)
    assert again.backward == (2.0, 3.0, 3.0)
    assert again.weight == priced.weight
    assert priced.moments == (600, 600, 600)  # what a backward has besides what is saved
    assert again.moments == (600, 1600, 1600)  # beside the gradient of its output it runs again
    assert again.later == (0, 950 - VALUE, 950)  # what its linear layers leave, more than it saves


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "pipedream"])
@pytest.mark.parametrize("wanted", ["none", "full", {"layers.[02]": True}])
def test_the_passes_and_the_simulator_count_the_same(
    schedule: str, wanted: str | Mapping[str, bool]
) -> None:
    problem = problem_of("gpt-dropout", wanted, schedule=schedule)
    plan = planned(problem)
    lowered = lower(problem.graph, plan, problem.under(plan).cut)
    own, found = costs(problem, plan), stage_costs(problem, plan, lowered)
    for mine, theirs in zip(own, found, strict=True):
        assert mine.forward == pytest.approx(theirs.forward)
        assert mine.backward == pytest.approx(theirs.backward)
        assert (mine.resident, mine.saved) == (theirs.resident, theirs.saved)
    step = simulate_lowered(lowered, found, message_seconds(problem, lowered))
    assert estimate(problem, plan).step_time == pytest.approx(step.step_time)
    assert estimate(problem, plan).peak_memory == step.peak_memory


def test_recomputation_takes_time_and_saves_memory() -> None:
    def step(wanted: str) -> tuple[float, int]:
        problem = problem_of("gpt-dropout", wanted, schedule="gpipe")
        found = estimate(problem, planned(problem))
        return found.step_time, max(found.peak_memory)

    (short, large), (long, little) = step("none"), step("full")
    assert 1.1 * short < long < 1.6 * short
    assert little < 0.7 * large


def least(problem: Problem) -> int:
    """The bytes of the fullest rank, as the simulator has it."""
    return max(estimate(problem, planned(problem)).peak_memory)


def test_nothing_is_recomputed_where_memory_suffices() -> None:
    assert planned(problem_of(recompute="auto")).recompute == ()
    assert planned(problem_of(recompute="auto", stages="auto", schedule="auto")).recompute == ()


@pytest.mark.parametrize("stages", ["even", "auto"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "auto"])
def test_memory_forces_recomputation(schedule: str, stages: str) -> None:
    def problem(memory: int | None, wanted: str) -> Problem:
        return problem_of("gpt-dropout", wanted, memory=memory, schedule=schedule, stages=stages)

    memory = 210_000
    with pytest.raises(pc.InfeasibleError):
        planned(problem(memory, "none"))
    plan = planned(problem(memory, "auto"))
    assert plan.recompute
    assert max(estimate(problem(memory, "auto"), plan).peak_memory) <= memory


def test_a_rank_that_fits_without_is_spared() -> None:
    """Under 1F1B the first rank holds two micro-batches, the last one."""
    problem = chain([1.0] * 4, saved=[4000] * 4, on=small(25_000))
    problem = dataclasses.replace(
        problem, options=Options(4, schedule="1f1b", stages="even", recompute="auto")
    )
    plan = planned(problem)
    tight = dataclasses.replace(problem, mesh=pc.Mesh(pipeline=2, device=small(13_000)))
    forced = planned(tight)
    assert plan.recompute == ()
    assert forced.recompute == ("embedding",)  # one block is enough
    assert forced.solution is not None
    assert forced.solution.status == "feasible"
    assert 0 < forced.solution.bound < forced.solution.objective


def test_the_error_says_what_would_do_with_everything_recomputed() -> None:
    with pytest.raises(pc.InfeasibleError) as caught:
        planned(problem_of("gpt-dropout", "auto", memory=100_000, stages="auto"))
    (note,) = (n for n in caught.value.__notes__ if n.startswith("with every block recomputed"))
    assert "the least that would do is" in note


@cache
def roomy() -> pc.Program:
    """A GPT without data on two H100 with memory for everything."""
    config = gpt.Config(layers=6, heads=8, hidden=512, vocabulary=1024, sequence=512)
    with torch.device("meta"):
        tokens = torch.zeros(8, 512, dtype=torch.long)
        inputs = {"tokens": tokens, "labels": tokens}
        return pc.compile(gpt.GPT(config), pc.Mesh(2, device="h100"), inputs, microbatches=8)


def test_cheap_operators_run_again_where_memory_is_short() -> None:
    memory = int(0.45 * max(roomy().simulate().peak_memory))
    mesh = pc.Mesh(2, device=dataclasses.replace(device("h100"), memory=memory))
    steps = {}
    for wanted in ("auto", "selective", "full"):
        with contextlib.suppress(pc.InfeasibleError):
            program = pc.compile(roomy(), mesh, microbatches=8, recompute=wanted)
            steps[wanted] = program.simulate().step_time
            if wanted == "auto":
                assert program.plan.selective
                assert Plan.from_json(program.plan.to_json()) == program.plan
                assert "norms, gates and gathers" in program.report().to_text()
    assert steps["auto"] <= 1.001 * min(steps.values())
    assert steps["auto"] < 0.97 * steps["full"]
    assert not roomy().plan.selective


def test_copies_to_the_host_run_beside_compute_and_the_slower_counts() -> None:
    hardware = device("h100")
    problem = dataclasses.replace(problem_of(), mesh=pc.Mesh(pipeline=2, device=hardware))
    plain = problem.priced(1)
    for bandwidth in (1e9, 1e15):
        link = dataclasses.replace(hardware, host=Link(bandwidth, 0.0))
        mesh = pc.Mesh(pipeline=2, device=link)
        away = problem.anew(mesh=mesh).selectively(False, offload=True)
        priced = away.recomputing(1, chosen(away, 1, "offload"))
        assert {*priced.copies} >= {*LAYERS}
        for b, block in enumerate(plain.cut.blocks):
            cost = plain.costs[b]
            copy = (
                (cost.saved + cost.saved_inputs) / bandwidth if block.name in priced.copies else 0
            )
            assert priced.forward[b] == max(plain.forward[b], copy)
            assert priced.backward[b] == max(plain.backward[b], copy)


def test_what_memory_forces_is_offloaded_where_the_link_is_faster_than_a_second_run() -> None:
    memory = int(0.35 * max(roomy().simulate().peak_memory))
    steps = []
    for bandwidth in (5e10, 4.5e11):  # PCIe 5.0; NVLink-C2C
        host = Link(bandwidth, 1e-5)
        mesh = pc.Mesh(2, device=dataclasses.replace(device("h100"), memory=memory, host=host))
        program = pc.compile(roomy(), mesh, microbatches=8)
        assert program.plan.recompute
        assert program.plan.offload == (bandwidth > 1e11)
        assert max(program.simulate().peak_memory) <= memory
        steps.append(program.simulate().step_time)
    assert steps[1] < 0.98 * steps[0]


def test_nothing_is_offloaded_that_the_memory_of_a_node_has_no_room_for() -> None:
    memory = int(0.35 * max(roomy().simulate().peak_memory))
    fast = dataclasses.replace(device("h100"), memory=memory, host=Link(4.5e11, 1e-5))
    offloading = pc.compile(roomy(), pc.Mesh(2, device=fast), microbatches=8)
    most = max(rank.host for rank in offloading.report().ranks)
    assert most > 0
    enough, less, none = (
        pc.Mesh(2, device=dataclasses.replace(fast, host_memory=room))
        for room in (2 * most, 2 * most - 1, 1)
    )
    assert pc.compile(roomy(), enough, microbatches=8).plan == offloading.plan
    leaner = pc.compile(roomy(), less, microbatches=8)
    assert max(rank.host for rank in leaner.report().ranks) < most
    assert leaner.simulate().step_time > offloading.simulate().step_time
    assert not pc.compile(roomy(), none, microbatches=8).plan.offload
    words = rf"would keep {most:,} bytes .* a node of h100 has {2 * most - 1:,} \(host_memory\)"
    with pytest.raises(pc.InfeasibleError, match=words):
        pc.compile(roomy(), less, microbatches=8, plan=offloading.plan)
    tiny = pc.Mesh(2, device=dataclasses.replace(device("h100"), host_memory=1000))
    with pytest.raises(pc.InfeasibleError, match="recompute layers, or take more ranks"):
        pc.compile(roomy(), tiny, microbatches=8, recompute="offload")


def test_what_waits_in_the_memory_of_a_node_is_told_where_blocks_are_stages() -> None:
    """With parameters in pieces a program has a stage for each block, and the embedding, which is
    not offloaded, keeps nothing for the layer behind."""
    mesh, kept = pc.Mesh(pipeline=2, data=2, device="h100"), []
    for level in (0, 3):
        program = pc.compile(
            roomy(), mesh, microbatches=8, zero=level, recompute="offload", schedule="1f1b",
            stages="even", vocabulary="whole",
        )  # fmt: skip
        kept.append([rank.host for rank in program.report().ranks])
    for whole, pieces in zip(*kept, strict=True):
        assert 0.9 * whole <= pieces <= whole


@pytest.mark.parametrize(("ranks", "gibibytes"), [(1, 0.66), (1, 0.5), (2, 0.6)])
def test_no_plan_is_below_the_bound_whatever_memory_makes_it_do(
    ranks: int, gibibytes: float
) -> None:
    memory, host = int(gibibytes * 2**30), Link(4.5e11, 1e-5)
    mesh = pc.Mesh(
        ranks, data=2, device=dataclasses.replace(device("h100"), memory=memory, host=host)
    )
    program = pc.compile(roomy(), mesh, microbatches=8)
    assert program.plan.offload
    least = least_step(program.problem, start(program.problem))
    assert 0.7 < least / program.simulate().step_time <= 1


def test_a_device_without_a_link_to_its_host_cannot_offload() -> None:
    lone = dataclasses.replace(device("h100"), name="lone", host=None)
    for mesh in (pc.Mesh(pipeline=2, device=lone), pc.Cluster(devices_per_node=2, device=lone)):
        with pytest.raises(pc.InputError, match="the file of 'lone' does not say how fast"):
            pc.compile(zoo.captured("gpt"), mesh, recompute="offload", progress=False)


def test_a_plan_that_offloads_is_refused_where_something_else_was_asked_for() -> None:
    made = pc.compile(graph_of("gpt"), pc.Mesh(pipeline=2), microbatches=4, recompute="offload")
    assert pc.Plan.from_json(made.plan.to_json()) == made.plan
    with pytest.raises(pc.PlanError, match="the plan offloads activations to the host"):
        pc.compile(
            graph_of("gpt"), pc.Mesh(pipeline=2), microbatches=4, recompute="full", plan=made.plan
        )
