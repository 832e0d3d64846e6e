"""What a program says of other sizes is what compiling it at these sizes says."""

from functools import cache

import pytest

import parcompiler as pc
from parcompiler.passes.estimate import costs, estimate, messages
from parcompiler.passes.shard.local import local
from parcompiler.report import Report
from parcompiler.report.serial import rounded
from parcompiler.symbolic.naming import symbol
from tests.symbolic.models import made

PINS = {"*.ffn.up.weight": "S(0)", "*.attention.qkv.weight": "S(0)"}


@cache
def program_of(batch: int, sequence: int, tensor: int = 1, microbatches: int = 4) -> pc.Program:
    model, inputs = made("gpt", batch, sequence)
    return pc.compile(
        model,
        pc.Mesh(pipeline=2, tensor=tensor, device="a100-80g"),
        inputs,
        microbatches=microbatches,
        schedule="1f1b",
        vocabulary="whole",
        stages=[2, 2],
        sharding=PINS if tensor > 1 else "auto",
        progress=False,
    )


@pytest.mark.parametrize("tensor", [1, 2])
def test_stages_and_step_at_other_sizes_are_those_of_a_fresh_compile(tensor: int) -> None:
    program, fresh = program_of(2, 32, tensor), program_of(4, 24, tensor, microbatches=6)
    found = program.costs.at(batch=4, sequence=24, microbatches=6)
    own = local(fresh.problem, fresh.plan)
    for stage, cost in zip(found.stages, costs(own, fresh.plan), strict=True):
        assert (stage.forward, stage.backward) == (cost.forward, cost.backward)
        assert (stage.activations, stage.state) == (cost.saved, cost.resident)
    assert found.stages[0].sent == sum(item.nbytes for item in messages(own, fresh.plan))
    assert found.step_time == estimate(own, fresh.plan).step_time
    assert rounded(found.stages) == fresh.report().stages


def test_without_sizes_the_figures_are_those_of_the_program() -> None:
    program = program_of(2, 32)
    found = program.costs.at()
    degrees = {"microbatches": 4, "data": 1, "tensor": 1, "pipeline": 2}
    assert dict(found.sizes) == {"batch": 2, "sequence": 32} | degrees
    assert found.step_time == program.simulate().step_time
    assert found.peak_memory == program.simulate().peak_memory


def test_what_tensor_ranks_send_is_in_the_forms() -> None:
    program, fresh = program_of(2, 32, tensor=2), program_of(4, 24, tensor=2, microbatches=6)
    found = program.costs.templates["Layer"]
    said = [item for item in fresh.report().exchanged if item.template == "Layer" and not item.once]
    for side, backward in (("forward", False), ("backward", True)):
        sent = sum(item.sent for item in said if item.backward == backward)
        form = getattr(found, f"sent_{side}")
        assert form.subs({symbol("b"): 4, symbol("s"): 24}) == sent > 0
    assert program_of(2, 32).costs.templates["Layer"].sent_forward == 0


def test_a_stage_is_the_sum_of_its_blocks_and_keeps_what_is_between_them() -> None:
    found = program_of(2, 32).costs
    first = found.templates["EmbeddingPositions"], found.templates["Layer"]
    work = found.stages[0].flops_forward - first[0].flops_forward - first[1].flops_forward
    assert work.expand() == 0
    between = found.stages[0].saved - first[0].saved - first[1].saved
    assert str(between.expand()) == "128*b*s"  # the input of the layer, 32 numbers of 4 bytes
    assert str(first[1].message) == "128*b*s"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rows": 4}, "the costs do not depend on 'rows' (known: batch, sequence)"),
        ({"batch": 0}, "batch must be a positive integer (0 given)"),
        ({"microbatches": 0}, "microbatches must be a positive integer (0 given)"),
        ({"data": True}, "data must be a positive integer (True given)"),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_name(given: dict[str, int], said: str) -> None:
    with pytest.raises(pc.InputError) as refusal:
        program_of(2, 32).costs.at(**given)
    assert said in str(refusal.value)


def test_a_length_beyond_the_tables_of_a_model_is_refused() -> None:
    model, inputs = made("llama", 2, 32)  # its rotary tables have 64 rows
    program = pc.compile(model, pc.Mesh(device="a100-80g"), inputs, progress=False)
    assert program.costs.at(sequence=64).step_time > program.costs.at(sequence=32).step_time
    with pytest.raises(pc.InputError, match="does not run at batch 2, sequence 65"):
        program.costs.at(sequence=65)


def test_the_report_has_the_closed_forms_when_they_are_asked_for() -> None:
    program = program_of(2, 32)
    assert "Closed forms" not in program.report().to_text()
    report = program.report(forms=True)
    text = report.to_text()
    assert "b  batch, from 2 on, here 2" in text
    assert "Closed forms" in text
    assert {item.name for item in report.forms} >= {"Layer", "stage 0", "stage 1"}
    assert Report.from_json(report.to_json()) == report


def test_costs_say_in_a_line_what_there_is_to_ask_for() -> None:
    assert repr(program_of(2, 32).costs) == (
        "Costs(GPT, 2 stages, 4 micro-batches: .templates, .stages, .at(batch=..., sequence=...))"
    )
