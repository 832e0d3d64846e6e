"""The front door: what compile refuses and how it says so, and what it leaves alone."""

import copy
import dataclasses
import gc
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parcompiler as pc
from parcompiler.device import device
from parcompiler.passes import SchedulePass
from parcompiler.plan import StageChoice, VocabularyChoice
from parcompiler.schedules import build
from tests import zoo
from tests.runtime.workers import batch, compiled, mixed

Edit = Callable[[pc.Plan], pc.Plan]


@pytest.fixture(scope="module")
def program() -> pc.Program:
    """A GPT of four layers on two stages."""
    model, inputs = zoo.build("gpt")
    return pc.compile(model, pc.Mesh(pipeline=2), inputs, microbatches=4, schedule="1f1b")


def small(memory: int) -> pc.Device:
    """The CPU of the catalogue with so many bytes of memory."""
    return dataclasses.replace(device("cpu"), name="small", memory=memory)


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_of_cycles_is_as_it_was_behind_a_compile(
    program: pc.Program, is_on: bool
) -> None:
    was_on = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        pc.compile(program, pc.Mesh(pipeline=2), microbatches=4, schedule="1f1b")
        assert gc.isenabled() is is_on
    finally:
        (gc.enable if was_on else gc.disable)()


# Options


@pytest.mark.parametrize("count", [0, -1, True, 2.5, "4", None])
def test_microbatches_must_be_a_positive_integer(count: object) -> None:
    if count is None:
        assert compiled(mixed(), microbatches=None).plan.microbatches == 4  # type: ignore[arg-type]
        return
    with pytest.raises(pc.InputError, match="microbatches must be a positive integer"):
        compiled(mixed(), microbatches=count)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("schedule", "waltz", "schedule must be one of 'auto', 'search', 'naive', 'gpipe',"),
        ("schedule", None, "schedule must be one of"),
        ("precision", "fp8", "one of None, 'fp32', 'fp64', 'bf16', 'fp16' ('fp8' given)"),
        ("precision", torch.float64, "precision must be one of None, 'fp32', 'fp64'"),
        ("optimizer", "lion", "optimizer must be one of 'adagrad', 'adamw', "),
        ("optimizer", torch.optim.AdamW, "optimizer must be one of 'adagrad', 'adamw', "),
        ("stages", "odd", "stages must be one of 'auto', 'even' ('odd' given)"),
        ("stages", (3, 0), "stages must be 'auto', 'even' or the number of blocks of each stage"),
        ("stages", (), "positive integers (() given)"),
        ("stages", (2.0, 3), "positive integers ((2.0, 3) given)"),
        ("stages", (True, 5), "positive integers ((True, 5) given)"),
        ("stages", 2, "positive integers (2 given)"),
        ("virtual_stages", 0, "virtual_stages must be a positive integer (0 given)"),
        ("virtual_stages", 1.5, "virtual_stages must be a positive integer (1.5 given)"),
        (
            "vocabulary",
            "vocab-3",
            "vocabulary must be one of 'auto', 'whole', 'naive', 'vocab-1', 'vocab-2', "
            "'interlaced' ('vocab-3' given)",
        ),
        ("sharding", "columns", "sharding must be one of 'auto' ('columns' given)"),
        (
            "sharding",
            {"*": "P"},
            "sharding cannot place '*' as partial sums ('P'): write 'R' or 'S(0)'",
        ),
        ("sharding", {"*": "S(0 sorted)"}, "sharding cannot place '*' as 'S(0 sorted)', which is"),
        ("sharding", {"*": "S(1 zigzag)"}, "sharding cannot place '*' as 'S(1 zigzag)', which is"),
        (
            "recompute",
            "all",
            "recompute must be one of 'auto', 'none', 'selective', 'full', 'offload' ('all' given)",
        ),
        (
            "recompute",
            {"layers.*": 1},
            "recompute must be 'auto', 'none', 'selective', 'full', 'offload' or a dict such",
        ),
        ("recompute", {0: True}, "a dict such as {'layers.*': True} ({0: True} given)"),
        (
            "recompute",
            True,
            "recompute must be 'auto', 'none', 'selective', 'full', 'offload' or a dict such",
        ),
        ("loss", "mse", "loss must be a function of the model's outputs that returns a scalar"),
        ("loss", torch.nn.MSELoss, "loss must be a function of the model's outputs that returns"),
        (
            "loss",
            torch.nn.MSELoss(),
            "loss is called with the model's outputs alone, and MSELoss() takes more (missing a ",
        ),
        (
            "loss",
            lambda outputs, batch: outputs - batch,
            "takes more (missing a required argument: 'batch'): where it needs targets",
        ),
        ("mesh", 2, "compile needs a Mesh, such as Mesh(pipeline=2) (int given)"),
        ("plan", "{}", "plan must be a Plan: read JSON by Plan.from_json (str given)"),
        ("plan", {"model": "m"}, "plan must be a Plan: read JSON by Plan.from_json (dict given)"),
    ],
)
def test_an_option_that_is_not_offered_is_refused_with_what_is(
    option: str, value: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object) -> None:
        pytest.fail("capture had started")

    monkeypatch.setattr("parcompiler.flow.capture", started)
    with pytest.raises(pc.InputError, match=re.escape(message)):
        compiled(mixed(), **{option: cast(Any, value)})


def test_integers_of_numpy_are_integers(program: pc.Program) -> None:
    counts = np.array([3, 3])
    again = pc.compile(
        program,
        pc.Mesh(pipeline=np.int64(2)),  # type: ignore[arg-type]
        microbatches=np.int32(4),  # type: ignore[arg-type]
        virtual_stages=np.int64(1),  # type: ignore[arg-type]
        stages=counts,  # type: ignore[arg-type]
    )
    assert (
        again.plan == pc.compile(program, pc.Mesh(pipeline=2), microbatches=4, stages=[3, 3]).plan
    )
    assert pc.Plan.from_json(again.plan.to_json()) == again.plan


def test_microbatches_are_four_for_each_stage_unless_given(program: pc.Program) -> None:
    assert pc.compile(program, pc.Mesh(pipeline=2)).plan.microbatches == 8
    assert pc.compile(program, pc.Mesh()).plan.microbatches == 4


# The model and its inputs


@pytest.mark.parametrize("model", [None, 3, nn.Linear, "gpt", lambda x: x])
def test_what_is_no_module_is_refused(model: Any) -> None:
    with pytest.raises(pc.InputError, match=r"compile needs a torch\.nn\.Module"):
        pc.compile(model, pc.Mesh(), batch(1))


def test_inputs_are_needed() -> None:
    with pytest.raises(pc.InputError, match="compile needs inputs: one micro-batch"):
        pc.compile(mixed(), pc.Mesh())


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": batch(1)["x"]}, "missing a required argument: 'labels'"),
        ({**batch(1), "mask": None}, "got an unexpected keyword argument 'mask'"),
        ((batch(1)["x"],), "missing a required argument: 'labels'"),
        ((*batch(1).values(), 1), "too many positional arguments"),
        ((), "missing a required argument: 'x'"),
        ({}, "missing a required argument: 'x'"),
    ],
)
def test_inputs_that_do_not_fit_forward_are_refused_with_its_signature(
    inputs: Any, message: str
) -> None:
    pattern = rf"inputs do not fit Mixed\.forward\(x: .*labels: .*\).*: {re.escape(message)}"
    with pytest.raises(pc.InputError, match=pattern):
        pc.compile(mixed(), pc.Mesh(), inputs)


@pytest.mark.parametrize("inputs", [3, "text", {1, 2}, np.ones(2)])
def test_inputs_of_no_known_form_are_refused(inputs: Any) -> None:
    with pytest.raises(pc.InputError, match="dict of keyword arguments or a tuple of positional"):
        pc.compile(mixed(), pc.Mesh(), inputs)


def test_a_program_is_compiled_again_without_its_inputs(program: pc.Program) -> None:
    again = pc.compile(program, pc.Mesh(pipeline=3), microbatches=2)
    assert again.model is program.model
    assert len(again.plan.stages or ()) == 3
    with pytest.raises(pc.InputError, match="a Program is captured already: give neither inputs"):
        pc.compile(program, pc.Mesh(), batch(1))
    with pytest.raises(pc.InputError, match="a Graph is captured already"):
        pc.compile(program.captured, pc.Mesh(), loss=lambda outputs: outputs)


def test_a_program_of_a_graph_has_no_model_to_be_compared_with(program: pc.Program) -> None:
    again = pc.compile(program.captured, pc.Mesh(pipeline=2))
    with pytest.raises(pc.InputError, match=r"verify\(\) needs the original model"):
        again.verify()


# Divisions that cannot be


def test_more_stages_than_blocks_are_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))
    with pytest.raises(pc.InfeasibleError, match=r"more stages than blocks \(9 > 2\): use fewer"):
        pc.compile(model, pc.Mesh(pipeline=9), (batch(1)["x"],), loss=lambda y: y.sum())


class Residual(nn.Module):
    """Layers that add to a part of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        for layer in self.layers:
            x[:, :3] += layer(x)
        return x.sum()


@pytest.mark.parametrize("stages", ["auto", "even"])
def test_the_update_in_place_that_joins_blocks_is_named(stages: str) -> None:
    with pytest.raises(pc.ParcompilerError, match=r"more stages than \w+ \(2 > 1\)") as caught:
        pc.compile(Residual(), pc.Mesh(pipeline=2), (batch(1)["x"],), stages=stages)
    note = caught.value.__notes__[-1]
    assert note.startswith("4 of 4 pieces of the model stay together (layers.0 to layers.3)")
    assert "updated in place" in note
    assert "x[:, :3] += layer(x)" in note


def test_too_few_modules_are_counted() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))
    with pytest.raises(pc.InfeasibleError, match="more stages than blocks") as caught:
        pc.compile(model, pc.Mesh(pipeline=3), (batch(1)["x"],), loss=lambda y: y.sum())
    (note,) = caught.value.__notes__
    assert "2 pieces with parameters" in note


def test_threads_compile_one_after_the_other() -> None:
    def compiled(_: int) -> str:
        inputs = (batch(1)["x"],)
        return pc.compile(nn.Linear(6, 5), pc.Mesh(), inputs, loss=lambda y: y.sum()).plan.to_json()

    with ThreadPoolExecutor(3) as threads:
        assert len(set(threads.map(compiled, range(3)))) == 1


def test_an_operator_without_a_backward_on_meta_tensors_is_planned_on_tensor_ranks() -> None:
    class Margin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(1024, 4096), nn.Linear(4096, 4)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.multi_margin_loss(self.narrow(F.gelu(self.wide(x))), labels)

    with torch.device("meta"):
        inputs = {"x": torch.empty(64, 1024), "labels": torch.zeros(64, dtype=torch.long)}
        program = pc.compile(Margin(), pc.Mesh(tensor=2), inputs)
    targets = [str(n.target) for n in program.lowered.graph.fx_graph.nodes]
    assert "runtime.all_reduce" in targets
    assert program.simulate().step_time > 0


def test_a_device_with_too_little_memory_is_refused_with_the_least_that_would_do(
    program: pc.Program,
) -> None:
    """And with that and room for messages it works, and with half of that it says the same."""
    plain: dict[str, Any] = {"microbatches": 4, "schedule": "1f1b", "recompute": "none"}
    with pytest.raises(pc.InfeasibleError) as caught:
        pc.compile(program, pc.Mesh(pipeline=2, device=small(1_000)), **plain)
    text = str(caught.value)
    assert "no division into 2 stages fits the memory limit (1,000 bytes a stage" in text
    assert re.search(r"The largest part there is \w.* of .*\([\d,]+ bytes\)", text)
    least = least_memory(text)
    enough = pc.Mesh(pipeline=2, device=small(least + least // 10))
    assert pc.compile(program, enough, **plain).plan.stages
    assert "messages on their way come on top" in str(caught.value.__notes__)
    with pytest.raises(pc.InfeasibleError) as again:
        pc.compile(program, pc.Mesh(pipeline=2, device=small(least // 2)), **plain)
    assert least_memory(str(again.value)) == least


def test_what_does_not_fit_at_a_level_of_zero_is_told_of_a_higher_one(program: pc.Program) -> None:
    plain: dict[str, Any] = {"microbatches": 2, "recompute": "full"}
    peaks = [
        max(pc.compile(program, pc.Mesh(data=2), zero=level, **plain).simulate().peak_memory)
        for level in (0, 1)
    ]
    mesh = pc.Mesh(data=2, device=small(sum(peaks) // 2))
    with pytest.raises(pc.InfeasibleError) as caught:
        pc.compile(program, mesh, zero=0, **plain)
    said = "zero=1 was tried and fits on these ranks, where zero=0 does not"
    assert said in caught.value.__notes__
    assert pc.compile(program, mesh, zero=1, **plain).plan.zero == 1
    cluster = pc.Cluster(1, 2, small(min(peaks) // 9))
    with pytest.raises(pc.InfeasibleError, match=r"share more out \(zero=\"auto\"\)"):
        pc.compile(program, cluster, zero=0, **plain)


def test_a_margin_of_memory_stays_free_and_is_said(program: pc.Program) -> None:
    plain: dict[str, Any] = {"microbatches": 4, "schedule": "1f1b"}
    peak = max(pc.compile(program, pc.Mesh(pipeline=2), **plain).simulate().peak_memory)
    tight = pc.Mesh(pipeline=2, device=small(peak))
    assert not pc.compile(program, tight, **plain).plan.recompute
    made = pc.compile(program, tight, memory_margin=0.05, **plain)
    assert made.plan.recompute  # the rest of the memory is not enough without
    assert max(made.simulate().peak_memory) <= 0.95 * peak
    assert "5.0 % of it kept free" in made.report().to_text(120)
    with pytest.raises(pc.InfeasibleError) as caught:
        pc.compile(program, tight, memory_margin=0.95, **plain)
    assert "0.95 of each device's memory is kept free" in " ".join(caught.value.__notes__)
    with pytest.raises(pc.InputError, match="memory_margin must be the fraction"):
        pc.compile(program, tight, memory_margin=1.0)


def least_memory(text: str) -> int:
    found = re.search(r"the least that would do is ([\d,]+) bytes", text)
    assert found is not None, text
    return int(found[1].replace(",", ""))


def test_a_model_that_needs_a_gigabyte_does_not_fit_into_a_megabyte() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))
    inputs = (torch.ones(2, 4096, device="meta"),)
    mesh = pc.Mesh(pipeline=2, device=small(1_000_000))
    with pytest.raises(pc.InfeasibleError, match="parameters and optimizer states, most of them"):
        pc.compile(model, mesh, inputs, loss=lambda y: y.mean())


def test_what_does_not_fit_says_on_one_screen_what_is_missing_and_how_many_ranks_would_do() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
    inputs = (torch.ones(2, 256, device="meta"),)
    options: dict[str, Any] = {"loss": lambda y: y.mean(), "microbatches": 4, "schedule": "1f1b"}
    tight = small(4_000_000)
    with pytest.raises(pc.InfeasibleError) as caught:
        pc.compile(model, pc.Mesh(pipeline=2, device=tight), inputs, **options)
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    assert len(text.splitlines()) < 24
    assert max(map(len, text.splitlines())) < 400
    least = least_memory(text)
    missing = re.search(r"stage (\d) lacks ([\d,]+) bytes", text)
    assert missing is not None
    assert int(missing[2].replace(",", "")) + 4_000_000 >= least
    assert "layers" in text or re.search(r"\d+, \d+, \.\.\., \d+ \(\d+ blocks\)", text), text
    states = 12 * 256 * 257 * 16
    fewest = -(-states // 4_000_000)
    assert f"{states:,} bytes in all: fewer than {fewest} ranks" in text
    enough = re.search(r"(\d+) ranks \(pipeline=\d+, tensor=1, data=1\) were tried and fit", text)
    assert enough is not None
    count = int(enough[1])
    assert count >= fewest
    assert pc.compile(model, pc.Mesh(pipeline=count, device=tight), inputs, **options).plan.stages
    with pytest.raises(pc.InfeasibleError):
        pc.compile(model, pc.Mesh(pipeline=count - 1, device=tight), inputs, **options)


def test_counts_that_do_not_fit_into_the_memory_are_refused(program: pc.Program) -> None:
    mesh = pc.Mesh(pipeline=2, device=small(1_000))
    with pytest.raises(
        pc.InfeasibleError, match=r"rank \d of this division needs [\d,]+ bytes, sm"
    ):
        pc.compile(program, mesh, stages=(3, 3))


def test_counts_must_add_up_to_the_blocks(program: pc.Program) -> None:
    message = r"the counts \(4, 4\) add up to 8 blocks, but the model has 6 or \d+.*: embedding"
    with pytest.raises(pc.InputError, match=message):
        pc.compile(program, pc.Mesh(pipeline=2), stages=(4, 4))
    with pytest.raises(pc.InputError, match="stages has 3 counts for 2 pipeline stages"):
        pc.compile(program, pc.Mesh(pipeline=2), stages=(2, 2, 2))


def test_counts_are_kept(program: pc.Program) -> None:
    plan = pc.compile(program, pc.Mesh(pipeline=2), stages=(1, 5)).plan
    assert [len(choice.blocks) for choice in plan.stages or ()] == [1, 5]
    assert plan.solution is not None
    assert plan.solution.status == "given"


def test_even_deals_out_the_layers(program: pc.Program) -> None:
    plan = pc.compile(program, pc.Mesh(pipeline=2), stages="even").plan
    layers = [
        [name for name in choice.blocks if name.startswith("layers")]
        for choice in plan.stages or ()
    ]
    assert layers == [["layers.0", "layers.1"], ["layers.2", "layers.3"]]


def test_passes_that_leave_the_plan_undecided_are_refused(program: pc.Program) -> None:
    with pytest.raises(pc.PlanError, match=r"left the plan undecided \(it lacks granularity"):
        pc.compile(program, pc.Mesh(pipeline=2), passes=[SchedulePass()])


def test_passes_beside_a_plan_are_refused(program: pc.Program) -> None:
    with pytest.raises(pc.InputError, match="plan= has every decision, so that passes= would not"):
        pc.compile(program, pc.Mesh(pipeline=2), plan=program.plan, passes=[SchedulePass()])


# Plans


def test_compiling_twice_gives_the_same_bytes() -> None:
    texts = set()
    for _ in range(2):
        model, inputs = zoo.build("t5")
        texts.add(pc.compile(model, pc.Mesh(pipeline=3), inputs).plan.to_json())
    assert len(texts) == 1


@pytest.mark.parametrize("options", [{}, {"stages": "even"}, {"stages": (2, 4)}])
def test_a_reused_plan_gives_the_same_program(program: pc.Program, options: dict[str, Any]) -> None:
    mesh = pc.Mesh(pipeline=2)
    first = pc.compile(program, mesh, schedule="gpipe", microbatches=3, **options)
    plan = pc.Plan.from_json(first.plan.to_json())
    for again in (
        pc.compile(program, mesh, plan=plan),
        pc.compile(program, mesh, schedule="gpipe", microbatches=3, plan=plan, **options),
    ):
        assert again.plan.to_json() == first.plan.to_json()
        for rank in range(2):
            assert str(again.instructions(rank)) == str(first.instructions(rank))
        assert again.simulate() == first.simulate()


def test_a_reused_plan_exports_the_same_bytes(program: pc.Program, tmp_path: Path) -> None:
    again = pc.compile(program, pc.Mesh(pipeline=2), plan=program.plan)
    folders = [item.export(tmp_path / str(n)) for n, item in enumerate((program, again))]
    asked = {"request.json", "SHA256SUMS"}  # what was asked for is another thing, and its checksum
    files = [
        {
            path.relative_to(folder): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and path.name not in asked
        }
        for folder in folders
    ]
    assert files[0] == files[1]


def test_a_plan_of_another_model_is_refused(program: pc.Program) -> None:
    model, inputs = zoo.build("llama")
    with pytest.raises(pc.PlanError, match=r"for another model \(plan: 'GPT', here: 'Llama'\)"):
        pc.compile(model, pc.Mesh(pipeline=2), inputs, plan=program.plan)
    model, inputs = zoo.own_gpt(layers=3)
    with pytest.raises(pc.PlanError, match="for another graph, as its fingerprint says") as caught:
        pc.compile(model, pc.Mesh(pipeline=2), inputs, plan=program.plan)
    assert "inputs, loss=, loss_weights=, outputs= and exact= that it" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mesh", {"mesh": pc.Mesh(pipeline=3)}),
        ("mesh", {"mesh": pc.Mesh(pipeline=2, device="h100")}),
        ("number of micro-batches", {"microbatches": 5}),
        ("precision", {"precision": "fp64"}),
        ("optimizer", {"optimizer": "sgd"}),
    ],
)
def test_a_plan_for_something_else_is_refused(
    program: pc.Program, name: str, options: dict[str, Any]
) -> None:
    with pytest.raises(
        pc.PlanError, match=f"the plan was made for another {name}.*compile without plan="
    ):
        pc.compile(program, **{"mesh": pc.Mesh(pipeline=2), **options}, plan=program.plan)


@pytest.mark.parametrize(
    "edit",
    [
        lambda plan, text: dataclasses.replace(plan, fingerprint=text),
        lambda plan, text: dataclasses.replace(
            plan, mesh=dataclasses.replace(plan.mesh, device=text)
        ),
        lambda plan, text: dataclasses.replace(plan, schedule=text),
        lambda plan, text: dataclasses.replace(plan, vocabulary=VocabularyChoice(text)),
        lambda plan, text: dataclasses.replace(plan, recompute=(text,)),
    ],
    ids=["fingerprint", "device", "schedule", "vocabulary", "recompute"],
)
def test_long_texts_of_a_plan_are_shortened_in_messages(
    program: pc.Program, edit: Callable[[pc.Plan, str], pc.Plan]
) -> None:
    with pytest.raises(pc.PlanError, match=r"^.{,1000}$"):
        pc.compile(program, pc.Mesh(pipeline=2), plan=edit(program.plan, "x" * 100_000))


def test_a_plan_of_another_schedule_than_asked_for_is_refused(program: pc.Program) -> None:
    with pytest.raises(pc.PlanError, match=r"has schedule '1f1b' \(asked for: 'gpipe'"):
        pc.compile(program, pc.Mesh(pipeline=2), schedule="gpipe", plan=program.plan)


@pytest.mark.parametrize("stages", ["even", (2, 4), (3, 1, 2)])
def test_a_plan_of_other_stages_than_asked_for_is_refused(
    program: pc.Program, stages: str | tuple[int, ...]
) -> None:
    mesh, blocks = (
        pc.Mesh(pipeline=2),
        [b for item in program.plan.stages or () for b in item.blocks],
    )
    plan = moved(program.plan, [(blocks[:1], 0), (blocks[1:], 1)])
    with pytest.raises(
        pc.ParcompilerError, match=r"the plan has other stages, of 1, 5|3 counts for 2"
    ):
        pc.compile(program, mesh, stages=stages, plan=plan)
    assert pc.compile(program, mesh, stages=(1, 5), plan=plan).plan.stages == plan.stages


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"virtual_stages": 3, "orders": build("1f1b", 2, 4).cells()},
            "has virtual_stages 3, and its orders have 1",
        ),
        ({"recompute": ("layers.0", "layers.0")}, "the plan recomputes 'layers.0' twice"),
    ],
)
def test_fields_of_a_plan_that_contradict_each_other_are_refused(
    program: pc.Program, fields: dict[str, Any], message: str
) -> None:
    plan = dataclasses.replace(program.plan, **fields)
    with pytest.raises(pc.PlanError, match=message):
        pc.compile(program, pc.Mesh(pipeline=2), plan=plan)


def test_tensors_of_a_plan_are_held_as_its_nodes_say() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh, pins = pc.Mesh(tensor=2), {"0.weight": "S(0)"}
    program = pc.compile(layers, mesh, (torch.zeros(2, 8),), torch.sum, sharding=pins)
    text = program.plan.to_json()
    assert pc.compile(program, mesh, plan=pc.Plan.from_json(text)).plan == program.plan
    edited = pc.Plan.from_json(text.replace('weight: S(0)"', 'weight: S(1)"', 1))
    with pytest.raises(pc.PlanError, match=r"tensors .*weight: S\(1\).* as .*weight: S\(0\)"):
        pc.compile(program, mesh, plan=edited)


def moved(plan: pc.Plan, stages: list[tuple[list[str], int]]) -> pc.Plan:
    choices = tuple(StageChoice(tuple(blocks), rank) for blocks, rank in stages)
    return dataclasses.replace(plan, stages=choices)


def blocks_of(plan: pc.Plan) -> list[str]:
    return [name for choice in plan.stages or () for name in choice.blocks]


def without_first(plan: pc.Plan) -> pc.Plan:
    names = blocks_of(plan)
    return moved(plan, [(names[1:3], 0), (names[3:], 1)])


def with_first_twice(plan: pc.Plan) -> pc.Plan:
    names = blocks_of(plan)
    return moved(plan, [(names[:3], 0), ([names[0], *names[3:]], 1)])


def with_a_stranger(plan: pc.Plan) -> pc.Plan:
    names = blocks_of(plan)
    return moved(plan, [(names[:3], 0), ([*names[3:], "layers.99"], 1)])


def on_wrong_ranks(plan: pc.Plan) -> pc.Plan:
    names = blocks_of(plan)
    return moved(plan, [(names[:3], 1), (names[3:], 0)])


def on_three_stages(plan: pc.Plan) -> pc.Plan:
    names = blocks_of(plan)
    return moved(plan, [(names[:2], 0), (names[2:3], 1), (names[3:], 2)])


def with_an_empty_stage(plan: pc.Plan) -> pc.Plan:
    return moved(plan, [(blocks_of(plan), 0), ([], 1)])


def backwards(plan: pc.Plan) -> pc.Plan:
    names = blocks_of(plan)
    return moved(plan, [(names[3:], 0), (names[:3], 1)])


def out_of_order(plan: pc.Plan) -> pc.Plan:
    names = blocks_of(plan)
    return moved(plan, [([names[1], names[0], *names[2:3]], 0), (names[3:], 1)])


ON_RANKS = r"the plan has stages on ranks \(.*\); its schedule '1f1b' has them on \(0, 1\)"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (without_first, r"lacks block 'embedding.*' \(blocks with vocabulary 'whole': "),
        (with_first_twice, r"misplaces block 'embedding.*' \(blocks with vocabulary 'whole'"),
        (with_a_stranger, r"the plan misplaces block 'layers.99'"),
        (on_wrong_ranks, ON_RANKS),
        (on_three_stages, ON_RANKS),
        (with_an_empty_stage, "no stage is empty|stage 1 has no block"),
        (backwards, "data flows forward|flows backward"),
        (out_of_order, "embedding"),
        (lambda plan: dataclasses.replace(plan, stages=None), "leaves 'stages' undecided"),
        (lambda plan: dataclasses.replace(plan, schedule=None), "leaves 'schedule' undecided"),
        (
            lambda plan: dataclasses.replace(plan, granularity=9),
            r"has granularity 9 \(the ",
        ),
        (
            lambda plan: dataclasses.replace(plan, schedule="waltz"),
            "has schedule 'waltz' without its orders .*: na",
        ),
        (lambda plan: dataclasses.replace(plan, sent=("x",)), r"has sent \('x',\)"),
        (lambda plan: dataclasses.replace(plan, recompute=None), "leaves 'recompute' undecided"),
        (
            lambda plan: dataclasses.replace(plan, recompute=("layers.99",)),
            r"recomputes 'layers.99', which is no block \(blocks: embedding",
        ),
    ],
)
def test_a_plan_edited_into_nonsense_is_refused(
    program: pc.Program, edit: Edit, message: str
) -> None:
    with pytest.raises(pc.PlanError, match=message):
        pc.compile(program, pc.Mesh(pipeline=2), plan=edit(program.plan))


def test_a_plan_may_be_edited(program: pc.Program) -> None:
    """Then what the solver said of the old division is not said of the new one, and what others
    would take is not compared with it."""
    data = json.loads(program.plan.to_json())
    data["weighed"] = [{"schedule": "1f1b", "virtual_stages": 1, "seconds": 1.0}]
    kept = pc.compile(program, pc.Mesh(pipeline=2), plan=pc.Plan.from_json(json.dumps(data)))
    assert kept.plan.weighed
    data["stages"][1]["blocks"].insert(0, data["stages"][0]["blocks"].pop())
    edited = pc.Plan.from_json(json.dumps(data))
    again = pc.compile(program, pc.Mesh(pipeline=2), plan=edited)
    assert again.plan.stages == edited.stages
    assert again.plan.solution is not None
    assert again.plan.solution.status == "given"
    assert program.plan.solution is not None
    assert again.plan.solution.objective > program.plan.solution.objective
    assert not (again.plan.weighed or again.plan.runner_up or again.plan.meshes)
    assert again.plan.vocabulary is None or again.plan.vocabulary.weighed is None


def test_what_a_plan_recomputes_may_be_edited_and_is_what_was_asked_for(
    program: pc.Program,
) -> None:
    mesh, name = pc.Mesh(pipeline=2), blocks_of(program.plan)[1]
    edited = dataclasses.replace(program.plan, recompute=(name,))
    again = pc.compile(program, mesh, plan=edited)
    assert again.plan.recompute == (name,)
    assert again.simulate().step_time > program.simulate().step_time
    assert pc.compile(program, mesh, plan=edited, recompute={name: True}).plan == again.plan
    with pytest.raises(pc.PlanError, match=rf"recomputes .* of {name!r} \(asked for: 'none'\)"):
        pc.compile(program, mesh, plan=edited, recompute="none")
    with pytest.raises(pc.PlanError, match=r"keeps the activations of .* \(asked for: 'full'\)"):
        pc.compile(program, mesh, plan=edited, recompute="full")
    with pytest.raises(pc.InputError, match="the pattern 'x' of recompute matches no block"):
        pc.compile(program, mesh, plan=edited, recompute={"x": True})


def test_an_edited_plan_must_fit_into_the_memory(program: pc.Program) -> None:
    plain: dict[str, Any] = {"microbatches": 4, "schedule": "1f1b", "recompute": "none"}
    with pytest.raises(pc.InfeasibleError) as caught:
        pc.compile(program, pc.Mesh(pipeline=2, device=small(1_000)), **plain)
    least = least_memory(str(caught.value))
    mesh = pc.Mesh(pipeline=2, device=small(least + least // 10))
    tight = pc.compile(program, mesh, **plain)
    names = blocks_of(tight.plan)
    assert pc.compile(program, mesh, plan=tight.plan).plan == tight.plan
    with pytest.raises(pc.InfeasibleError, match="rank 1 of this division needs"):
        pc.compile(program, mesh, plan=moved(tight.plan, [(names[:1], 0), (names[1:], 1)]))


# What is left alone


def surroundings() -> list[Any]:
    return [
        torch.get_rng_state().tolist(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.distributed.is_initialized(),
        torch.backends.mkldnn.is_available(),
        torch.are_deterministic_algorithms_enabled(),
    ]


@pytest.mark.parametrize("name", ["gpt-dropout", "resnet", "gpt-tied"])
def test_compile_verify_and_export_leave_everything_as_it_was(name: str, tmp_path: Path) -> None:
    model, inputs = zoo.build(name)
    first = next(model.children())
    first.eval()  # flags need not be alike
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    state = copy.deepcopy(model.state_dict())
    tensors = {n: id(t) for n, t in model.named_parameters(remove_duplicate=False)}
    flags = {n: m.training for n, m in model.named_modules()}
    wanted = {n: p.requires_grad for n, p in model.named_parameters()}
    given = {k: v.clone() for k, v in inputs.items()}
    torch.set_num_threads(2)
    try:
        before = surroundings()
        program = pc.compile(model, pc.Mesh(pipeline=2), inputs, microbatches=2)
        assert program.verify().ok
        program.export(tmp_path / "out")
        program.report()
        assert surroundings() == before
    finally:
        torch.set_num_threads(1)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert tensors == {n: id(t) for n, t in model.named_parameters(remove_duplicate=False)}
    assert flags == {n: m.training for n, m in model.named_modules()}
    assert wanted == {n: p.requires_grad for n, p in model.named_parameters()}
    assert [n for n, p in model.named_parameters() if p.grad is not None] == [
        next(iter(dict(model.named_parameters())))
    ]
    assert all(torch.equal(v, given[k]) for k, v in inputs.items())


def test_a_model_in_evaluation_mode_keeps_its_semantics() -> None:
    """No dropout, and batch norm by its running statistics, which stay."""
    model = mixed(dropout=0.5).eval()
    data = batch(2)
    wanted = [model(**{k: t[2 * i : 2 * i + 2] for k, t in data.items()}) for i in range(2)]
    program = compiled(model, 2)
    with program.worker() as worker:
        loss = worker.step(data)
        state = worker.gather_state_dict()
    assert torch.equal(loss, torch.stack(wanted).mean())
    assert state is not None
    assert all(torch.equal(state[n], t) for n, t in model.named_buffers())
    assert not model.training


def test_data_ranks_cannot_update_inside_the_step() -> None:
    mesh, inputs = pc.Mesh(pipeline=2, data=2), batch(1)
    with pytest.raises(pc.InputError, match=r"'pipedream' updates parameters inside .*\(data=2\)"):
        pc.compile(mixed(), mesh, inputs, microbatches=2, schedule="pipedream")


def test_statistics_of_a_group_of_ones_own_are_refused_by_the_path_of_their_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2, process_group=object()))
    with pytest.raises(pc.InputError, match=r"'1' is a SyncBatchNorm over .* \(data=2\): make it"):
        pc.compile(model, pc.Mesh(data=2), (torch.ones(4, 2),), loss=torch.sum)
    pc.compile(model, pc.Mesh(), (torch.ones(4, 2),), loss=torch.sum, microbatches=1)


def test_every_rank_of_the_mesh_has_its_instructions() -> None:
    model, inputs = zoo.build("gpt")
    program = pc.compile(model, pc.Mesh(pipeline=2, data=3), inputs, microbatches=2)
    texts = [str(program.instructions(rank)) for rank in range(6)]
    assert "to 3" in texts[0] and "to 4" in texts[1] and "to 5" in texts[2]
    assert all("ranks 0,1,2" in text for text in texts[:3])
    with pytest.raises(pc.InputError, match=r"there is no rank 6 \(ranks: 0 to 5\)"):
        program.instructions(6)
