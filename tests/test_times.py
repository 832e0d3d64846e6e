"""Times of templates: measured by running them with data, and kept in the plan."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

import parcompiler as pc
from parcompiler import times
from parcompiler.cost import timed
from parcompiler.cost.timed import BlockTime, Timed
from parcompiler.plan import TemplateTime
from tests import zoo

PINS = {"*.ffn.up.weight": "S(0)", "embedding.weight": "S(0)"}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured does not matter here."""
    monkeypatch.setattr(timed, "FEWEST", 1)
    monkeypatch.setattr(timed, "MOST", 1)
    monkeypatch.setattr(timed, "WARM", 1)


def compiled(name: str, mesh: pc.Mesh, plan: pc.Plan | None = None) -> pc.Program:
    model, inputs = zoo.build(name)
    costs = "measured" if plan is None else "model"
    return pc.compile(
        model, mesh, inputs, schedule="1f1b", vocabulary="whole", costs=costs, plan=plan
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


def test_a_plan_brings_its_times_along(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiled("gpt", pc.Mesh(pipeline=2))
    plan = pc.Plan.from_json(made.plan.to_json())
    monkeypatch.setattr(times, "time_block", None)  # it would fail
    again = compiled("gpt", pc.Mesh(pipeline=2), plan)
    assert again.plan == made.plan
    assert again.simulate().step_time == made.simulate().step_time


def test_the_step_is_predicted_from_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = BlockTime(forward=2.0, backward=3.0)
    monkeypatch.setattr(times, "time_block", lambda block: seconds)
    program = compiled("gpt", pc.Mesh())
    blocks = len(program.problem.under(program.plan).cut.blocks)
    wanted = 5.0 * blocks * program.plan.microbatches
    assert program.simulate().step_time == pytest.approx(wanted, rel=1e-6)


def test_gradients_add_up_as_they_do_in_a_step() -> None:
    weight = torch.fx.Graph()
    node = weight.placeholder("w")
    node.meta["val"] = torch.empty(2, 3, device="meta")
    product = weight.call_function(torch.ops.aten.mul.Tensor, (node, node))
    product.meta["val"] = torch.empty(2, 3, device="meta")
    block = Timed((product,), (product,), {"w"}, (), {product.name}, {}, torch.device("cpu"))
    block.backward(block.forward())
    first = block.held[node].grad.clone()
    block.backward(block.forward())
    assert torch.equal(block.held[node].grad, 2 * first)


def test_a_device_that_is_not_here_is_named() -> None:
    model, inputs = zoo.build("gpt")
    absent = dataclasses.replace(pc.Mesh(device="h100").hardware, name="h100")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(pc.InputError, match=r"needs the device that the mesh names: .*h100"):
        pc.compile(model, pc.Mesh(pipeline=2, device=absent), inputs, costs="measured")


def test_another_word_is_refused() -> None:
    model, inputs = zoo.build("gpt")
    with pytest.raises(pc.InputError, match="costs must be one of 'model', 'measured'"):
        pc.compile(model, pc.Mesh(), inputs, costs="real")


def test_a_block_that_cannot_run_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(block: Timed) -> BlockTime:
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
        (lambda item: dataclasses.replace(item, template="Nope"), "differ in template"),
        (lambda item: None, "differ in template 'Layer'"),
    ],
)
def test_times_edited_into_nonsense_are_refused(
    edit: Edit, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = BlockTime(forward=2.0, backward=3.0)  # real ones may ask for finer blocks
    monkeypatch.setattr(times, "time_block", lambda block: seconds)
    plan = compiled("gpt", pc.Mesh(pipeline=2)).plan
    assert plan.costs is not None
    edited = [edit(item) if item.template == "Layer" else item for item in plan.costs]
    wrong = dataclasses.replace(plan, costs=tuple(item for item in edited if item is not None))
    with pytest.raises(pc.PlanError, match=message):
        compiled("gpt", pc.Mesh(pipeline=2), wrong)
