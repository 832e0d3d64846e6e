"""Times of templates and of the vocabulary's passes: measured, and kept in the plan."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import parcompiler as pc
from parcompiler.bench import local
from parcompiler.bench.compiled import CompiledBlock
from parcompiler.bench.local import LocalBench
from parcompiler.cost import times
from parcompiler.cost.operation import Operation
from parcompiler.cost.times import RunningBlock, TimedBlock
from parcompiler.graph import Graph, NodeRoles
from parcompiler.instruction import Kind
from parcompiler.plan import TemplateTime, VocabularyTime
from parcompiler.runtime.compiled import build
from parcompiler.runtime.compiled.layers import Template, TracedLayer
from tests import zoo

PINS = {"*.ffn.up.weight": "S(0)", "embedding.weight": "S(0)"}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured does not matter here, and no process is started."""
    monkeypatch.setattr(times, "FEWEST", 1)
    monkeypatch.setattr(times, "MOST", 1)
    monkeypatch.setattr(times, "WARM", 1)
    monkeypatch.setattr(LocalBench, "exchanged", lambda self, exchanges, between: None)


def compiled(
    name: str, mesh: pc.Mesh, plan: pc.Plan | None = None, vocabulary: str = "whole"
) -> pc.Program:
    model, inputs = zoo.build(name)
    costs = "measured" if plan is None else "model"
    return pc.compile(
        model, mesh, inputs, schedule="1f1b", vocabulary=vocabulary, costs=costs, plan=plan
    )


@pytest.mark.parametrize("name", ["gpt", "t5", "resnet", "hf-gpt2"])
def test_every_template_of_a_model_runs_with_data(name: str) -> None:
    program = compiled(name, pc.Mesh(pipeline=2))
    assert program.plan.costs is not None
    cut = program.problem.under(program.plan).cut
    found = {item.template: item for item in program.plan.costs}
    assert found.keys() == {block.template for block in cut.blocks}
    assert all(item.forward > 0 and item.backward >= item.weight for item in found.values())


def test_the_templates_of_tensor_ranks_run_without_the_other_ranks() -> None:
    model, inputs = zoo.build("gpt")
    program = pc.compile(model, pc.Mesh(tensor=2), inputs, sharding=PINS, costs="measured")
    assert program.plan.costs
    assert all(item.forward > 0 for item in program.plan.costs)


def test_compiled_blocks_are_timed_as_the_runtime_compiles_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    given: list[TracedLayer] = []

    def traced(template: Template) -> TracedLayer:
        assert template.surroundings.training
        given.append(TracedLayer(template))
        return given[-1]  # without a compiler, which takes its time

    def time_block(block: RunningBlock) -> tuple[float, float]:
        assert isinstance(block, CompiledBlock)
        outputs = block.forward()
        block.backward(outputs)
        wanted = [t for t in block.block.forward() if t.requires_grad]
        found.append(([t for t in outputs if t.requires_grad], wanted))
        return 2.0, 3.0

    monkeypatch.setattr(build, "compiled", traced)
    monkeypatch.setattr(times, "time_block", time_block)
    model, inputs = zoo.build("gpt")
    program = pc.compile(model, pc.Mesh(tensor=2), inputs, sharding=PINS, costs="compiled")
    assert program.plan.costs is not None
    assert all(item.backward >= 3.0 for item in program.plan.costs)
    assert len(found) == len(given) >= 3
    for outputs, wanted in found:
        assert all(map(torch.equal, outputs, wanted))
    # What runs then steps in fused kernels: 7 reads and writes of an element for 20.
    problem = program.problem
    other = dataclasses.replace(
        problem, options=dataclasses.replace(problem.options, costs="model")
    )
    item = max(problem.graph.parameters, key=lambda item: item.nbytes)
    assert problem.update_seconds(item) < other.update_seconds(item) / 2


def test_what_tensor_ranks_exchange_is_asked_of_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[set[str], int, float]] = []

    def exchanged(self: LocalBench, exchanges: Sequence[Operation], between: float) -> float:
        asked.append(({one.name for one in exchanges}, len(exchanges), between))
        return 100.0

    seconds = (2.0, 3.0)
    monkeypatch.setattr(times, "time_block", lambda block: seconds)
    monkeypatch.setattr(LocalBench, "exchanged", exchanged)
    model, inputs = zoo.build("gpt")
    program = pc.compile(model, pc.Mesh(tensor=2), inputs, sharding=PINS, costs="measured")
    assert program.plan.costs is not None
    (layer,) = (item for item in program.plan.costs if item.template == "Layer")
    assert layer.forward == 102.0
    assert 3.0 < layer.backward < 103.0  # a part is beside products for weights
    assert asked
    for names, number, between in asked:
        assert names <= {"all-reduce", "all-gather", "reduce-scatter", "all-to-all"}
        assert between * number in (2.0, 3.0)


def timed_passes(
    graph: Graph, ranks: int, method: str, device: torch.device, *, fused: bool = False
) -> VocabularyTime:
    return VocabularyTime(method, s=7.0, normalize=0.0, t=5.0, embed=4.0, embed_backward=3.0)


def test_the_passes_of_the_vocabulary_take_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "time_passes", timed_passes)
    program = compiled("gpt", pc.Mesh(pipeline=2), vocabulary="vocab-1")
    plan = program.plan
    assert plan.vocabulary_costs == timed_passes(
        program.captured, 2, "vocab-1", torch.device("cpu")
    )
    wanted = {Kind.S: 7.0, Kind.T: 5.0, Kind.EMBED: 4.0, Kind.EMBED_BACKWARD: 3.0}
    events = program.simulate().events
    for kind, seconds in wanted.items():
        took = [e.end - e.begin for e in events if e.instruction and e.instruction.kind is kind]
        assert took
        assert took == pytest.approx([seconds] * len(took))
    monkeypatch.setattr(local, "time_passes", None)  # it would fail
    seconds = program.simulate().step_time
    assert program.costs.at().step_time == pytest.approx(seconds)
    # At other sizes they are scaled by the figures of the device.
    assert seconds / 2 < program.costs.at(sequence=8).step_time < seconds
    read = pc.Plan.from_json(plan.to_json())
    again = compiled("gpt", pc.Mesh(pipeline=2), read, vocabulary="vocab-1")
    assert again.plan == plan
    assert again.simulate().step_time == program.simulate().step_time


def test_operators_that_run_again_add_to_the_times_of_a_plan_as_to_measured_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = (2e-6, 3e-6)  # no more than what runs again
    monkeypatch.setattr(times, "time_block", lambda block: seconds)
    model, inputs = zoo.build("gpt")
    given: dict[str, Any] = {"schedule": "1f1b", "recompute": "selective"}
    program = pc.compile(model, pc.Mesh(pipeline=2), inputs, costs="measured", **given)
    again = pc.compile(model, pc.Mesh(pipeline=2), inputs, plan=program.plan, **given)
    assert again.simulate() == program.simulate()
    assert again.costs.at(batch=1).step_time == program.costs.at(batch=1).step_time


def test_a_vocabulary_on_stages_has_no_times_of_passes() -> None:
    plan = compiled("gpt", pc.Mesh(pipeline=2)).plan
    assert plan.vocabulary_costs is None
    assert "vocabulary_costs" not in plan.to_json()


def test_passes_that_cannot_run_here_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "time_passes", None)
    with pytest.raises(pc.InputError, match=r"the times of the vocabulary cannot be measured here"):
        compiled("gpt", pc.Mesh(pipeline=2), vocabulary="vocab-2")


@pytest.mark.parametrize(
    ("edited", "message"),
    [
        ({"t": -1.0}, r"vocabulary costs must have seconds as 't' \(-1.0 found"),
        ({"embed": math.inf}, r"vocabulary costs must have seconds as 'embed' \(inf found"),
        ({"embed": 1e300}, r"vocabulary costs must have seconds as 'embed' \(1e\+300 found; 0 to"),
        ({"method": "vocab-2"}, "of method 'vocab-2', and its vocabulary is 'vocab-1': measure"),
    ],
)
def test_times_of_passes_edited_into_nonsense_are_refused(
    edited: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "time_passes", timed_passes)
    plan = compiled("gpt", pc.Mesh(pipeline=2), vocabulary="vocab-1").plan
    assert plan.vocabulary_costs is not None
    costs = dataclasses.replace(plan.vocabulary_costs, **edited)
    wrong = dataclasses.replace(plan, vocabulary_costs=costs)
    with pytest.raises(pc.PlanError, match=message):
        compiled("gpt", pc.Mesh(pipeline=2), wrong, vocabulary="vocab-1")


def test_a_plan_brings_its_times_along(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiled("gpt", pc.Mesh(pipeline=2))
    plan = pc.Plan.from_json(made.plan.to_json())
    monkeypatch.setattr(times, "time_block", None)  # it would fail
    again = compiled("gpt", pc.Mesh(pipeline=2), plan)
    assert again.plan == made.plan
    assert again.simulate().step_time == made.simulate().step_time


def test_the_step_is_predicted_from_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = (2.0, 3.0)
    monkeypatch.setattr(times, "time_block", lambda block: seconds)
    program = compiled("gpt", pc.Mesh())
    blocks = len(program.problem.under(program.plan).cut.blocks)
    wanted = 5.0 * blocks * program.plan.microbatches
    assert program.simulate().step_time == pytest.approx(wanted, rel=1e-3)  # and the update


def test_gradients_add_up_as_they_do_in_a_step() -> None:
    weight = torch.fx.Graph()
    node = weight.placeholder("w")
    node.meta["val"] = torch.empty(2, 3, device="meta")
    product = weight.call_function(torch.ops.aten.mul.Tensor, (node, node))
    product.meta["val"] = torch.empty(2, 3, device="meta")
    roles = NodeRoles({"w"}, (), {product.name})
    block = TimedBlock((product,), (product,), roles, {}, torch.device("cpu"))
    block.backward(block.forward())
    first = block.state[node].grad.clone()
    block.backward(block.forward())
    assert torch.equal(block.state[node].grad, 2 * first)


def test_a_device_that_is_not_here_is_named() -> None:
    model, inputs = zoo.build("gpt")
    absent = dataclasses.replace(pc.Mesh(device="h100").hardware, name="h100")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(pc.InputError, match=r"needs the device that the mesh names: .*h100"):
        pc.compile(model, pc.Mesh(pipeline=2, device=absent), inputs, costs="measured")


def test_another_word_is_refused() -> None:
    model, inputs = zoo.build("gpt")
    with pytest.raises(pc.InputError, match="costs must be one of 'model', 'measured', 'compiled'"):
        pc.compile(model, pc.Mesh(), inputs, costs="real")


def test_a_block_that_cannot_run_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(block: TimedBlock) -> tuple[float, float]:
        message = "no such kernel"
        raise RuntimeError(message)

    monkeypatch.setattr(times, "time_block", fails)
    with pytest.raises(pc.InputError, match=r"cannot be measured here \(RuntimeError: no such ker"):
        compiled("gpt", pc.Mesh(pipeline=2))


Edit = Callable[[TemplateTime], TemplateTime | None]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda item: dataclasses.replace(item, forward=-1.0),
            r"seconds as 'forward' \(-1.0 found",
        ),
        (
            lambda item: dataclasses.replace(item, weight=math.nan),
            r"seconds as 'weight' \(nan found",
        ),
        (lambda item: dataclasses.replace(item, hidden=-2.0), r"seconds as 'hidden' \(-2.0"),
        (lambda item: dataclasses.replace(item, template="Nope"), "differ in template"),
        (lambda item: None, "differ in template 'Layer'"),
    ],
)
def test_times_edited_into_nonsense_are_refused(
    edit: Edit, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = (2.0, 3.0)  # real ones may ask for finer blocks
    monkeypatch.setattr(times, "time_block", lambda block: seconds)
    plan = compiled("gpt", pc.Mesh(pipeline=2)).plan
    assert plan.costs is not None
    edited = [edit(item) if item.template == "Layer" else item for item in plan.costs]
    wrong = dataclasses.replace(plan, costs=tuple(item for item in edited if item is not None))
    with pytest.raises(pc.PlanError, match=message):
        compiled("gpt", pc.Mesh(pipeline=2), wrong)
