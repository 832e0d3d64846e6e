"""The step at other sizes and degrees is the simulated one of a program compiled for them."""

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import sympy
import torch

import parcompiler as pc
from parcompiler.cost import times
from parcompiler.models import gpt
from parcompiler.plan import TemplateTime
from parcompiler.report.serial import rounded
from parcompiler.schedules import Schedule, build
from parcompiler.symbolic.costs import Costs, StepFigures
from parcompiler.symbolic.degrees import with_tensor
from parcompiler.symbolic.forms import FIELDS, check_ranks
from parcompiler.symbolic.naming import symbol
from parcompiler.symbolic.sizes import Unfit
from tests.symbolic.models import made

PINS = {
    "gpt": {"*.ffn.up.weight": "S(0)", "*.attention.qkv.weight": "S(0)"},
    "rows": {"embedding.weight": "S(0)", "*.ffn.up.weight": "S(0)"},
    "llama": {"*.ffn.up.weight": "S(0)", "*.ffn.gate.weight": "S(0)"},
}


@cache
def program_of(
    name: str = "gpt",
    batch: int = 2,
    sequence: int = 32,
    precision: str = "fp32",
    vocabulary: str = "whole",
    mesh: tuple[int, int, int] = (2, 1, 1),
    microbatches: int = 4,
    schedule: str | Schedule = "1f1b",
    stages: str | Sequence[int] = "auto",
    pins: str | None = None,
) -> pc.Program:
    """A program for `mesh`: pipeline, tensor and data ranks."""
    model, inputs = made(name, batch, sequence)
    return pc.compile(
        model,
        pc.Mesh(*mesh, device="a100-80g"),
        inputs,
        microbatches=microbatches,
        precision=precision,
        schedule=schedule,
        vocabulary=vocabulary,
        stages=stages,
        sharding=PINS[pins or name] if mesh[1] > 1 else "auto",
        progress=False,
    )


def agree(found: StepFigures, fresh: pc.Program) -> None:
    """What was found of a step is what its simulation and its report say."""
    step, report = fresh.simulate(), fresh.report()
    assert found.step_time == step.step_time
    assert found.peak_memory == step.peak_memory
    assert found.bubble == step.bubble
    assert rounded(found.stages) == report.stages
    assert found.messages == report.values
    assert rounded(found.averaged) == report.averaged


SWEEP = pytest.mark.sweep
ORDER = dataclasses.replace(build("1f1b", 2, 4), name="own")


@pytest.mark.parametrize(
    ("name", "precision", "vocabulary", "tensor"),
    [
        ("gpt", "fp32", "whole", 1),
        ("gpt", "bf16", "vocab-1", 2),
        ("llama", "fp32", "vocab-2", 1),
        ("llama", "bf16", "whole", 2),
        pytest.param("gpt", "fp32", "vocab-1", 1, marks=SWEEP),
        pytest.param("gpt", "bf16", "whole", 1, marks=SWEEP),
        pytest.param("gpt", "fp32", "whole", 2, marks=SWEEP),
        pytest.param("llama", "bf16", "vocab-1", 1, marks=SWEEP),
        pytest.param("llama", "fp32", "whole", 1, marks=SWEEP),
        pytest.param("llama", "bf16", "vocab-1", 2, marks=SWEEP),
    ],
)
def test_other_sizes_and_copies_are_those_of_a_fresh_compile(
    name: str, precision: str, vocabulary: str, tensor: int
) -> None:
    given = precision, vocabulary
    program = program_of(name, 2, 32, *given, (2, tensor, 1), stages="even")
    agree(program.costs.at(), program)
    fresh = program_of(name, 4, 24, *given, (2, tensor, 2), microbatches=6, stages="even")
    agree(program.costs.at(batch=4, sequence=24, microbatches=6, data=2), fresh)


@pytest.mark.parametrize(
    ("name", "vocabulary", "mesh"),
    [
        ("gpt", "whole", (2, 4, 3)),
        ("llama", "whole", (4, 2, 1)),
        ("gpt", "vocab-2", (4, 1, 2)),
        pytest.param("llama", "vocab-2", (4, 2, 1), marks=SWEEP),
        pytest.param("llama", "whole", (1, 4, 2), marks=SWEEP),
    ],
)
def test_other_degrees_are_those_of_a_fresh_compile(
    name: str, vocabulary: str, mesh: tuple[int, int, int]
) -> None:
    program = program_of(name, 2, 32, "bf16", vocabulary, (2, 2, 1))
    pipeline, tensor, data = mesh
    found = program.costs.at(pipeline=pipeline, tensor=tensor, data=data)
    agree(found, program_of(name, 2, 32, "bf16", vocabulary, mesh))
    assert dict(found.sizes) | {"data": data, "tensor": tensor, "pipeline": pipeline} == dict(
        found.sizes
    )


def test_a_backward_in_two_parts_is_that_of_a_fresh_compile() -> None:
    given: dict[str, Any] = {"schedule": "zb-h1", "stages": "even"}
    found = program_of(**given).costs.at(batch=1, sequence=24)
    agree(found, program_of(batch=1, sequence=24, **given))


def test_measured_seconds_change_as_the_figures_of_the_device_do() -> None:
    program = program_of()
    assert program.plan.granularity is not None
    priced = program.problem.priced(program.plan.granularity)
    templates = {b.template: c for b, c in zip(priced.cut.blocks, priced.costs, strict=True)}
    modelled = [times.modelled(*item, program.problem.device) for item in templates.items()]
    twice = [
        TemplateTime(item.template, 2 * item.forward, 2 * item.backward, 2 * item.weight)
        for item in modelled
    ]
    plan = dataclasses.replace(program.plan, costs=tuple(twice))
    given: Any = {"microbatches": 4, "precision": "fp32", "progress": False}
    measured = pc.compile(program, program.problem.mesh, plan=plan, **given)
    agree(measured.costs.at(), measured)
    assert not measured.costs.at().scaled
    found, like = (item.costs.at(batch=8, sequence=24) for item in (measured, program))
    assert found.scaled
    for stage, other in zip(found.stages, like.stages, strict=True):
        assert stage.forward == pytest.approx(2 * other.forward)
        assert stage.backward == pytest.approx(2 * other.backward)
    with pytest.raises(pc.InputError, match=r"measured with pipeline=2 \(1 given\)"):
        measured.costs.at(pipeline=1)


@pytest.mark.parametrize(
    ("program", "given", "said"),
    [
        ({}, {"tensor": 2}, "the plan splits no tensors: compile for 2 tensor ranks"),
        ({}, {"pipeline": 0}, "pipeline must be a positive integer (0 given)"),
        ({"stages": (2, 2)}, {"pipeline": 4}, "was given for 2 pipeline ranks (4 given)"),
        ({"schedule": ORDER}, {"pipeline": 4}, "order is for 2 pipeline ranks (4 given)"),
        ({"schedule": ORDER}, {"microbatches": 8}, "is for 4 micro-batches (8 given)"),
        (
            {"name": "llama", "schedule": "pipedream"},
            {"data": 2},
            "updates parameters inside the step, which data ranks cannot do together (data=2)",
        ),
        (
            {"vocabulary": "vocab-2", "mesh": (2, 2, 1)},
            {"pipeline": 1},
            "the plan's sharding says nothing of the layers of the vocabulary",
        ),
    ],
)
def test_degrees_that_the_plan_cannot_have_are_refused(
    program: dict[str, Any], given: dict[str, int], said: str
) -> None:
    with pytest.raises(pc.InputError) as refusal:
        program_of(**program).costs.at(**given)
    assert said in str(refusal.value)


def test_a_table_of_which_ranks_hold_rows_is_read_no_further_than_each_holds() -> None:
    given: dict[str, Any] = {"mesh": (2, 2, 1), "stages": "even", "pins": "rows"}
    costs = program_of(**given).costs
    assert [size.letter for size in costs.closed.sizes] == ["b", "s"]
    agree(costs.at(batch=4, sequence=24), program_of(batch=4, sequence=24, **given))
    (read,) = (item for item in costs.templates["EmbeddingPositions"].bytes_forward.atoms(sympy.Min)
               if "b" in str(item))  # fmt: skip
    assert str(read) == "Min(4096, 128*b*s)"  # 32 rows of 32 numbers


@cache
def split(heads: int = 16) -> pc.Program:
    """A GPT whose layers are split over two ranks, with heads for many more."""
    config = gpt.Config(layers=5, heads=heads, hidden=64, vocabulary=80, sequence=64)
    tokens = torch.zeros(2, 32, dtype=torch.long)
    return pc.compile(
        gpt.GPT(config),
        pc.Mesh(pipeline=5, tensor=2, device="a100-80g"),
        {"tokens": tokens, "labels": tokens},
        microbatches=4,
        schedule="1f1b",
        stages="even",
        recompute={"layers.1": True},
        sharding=PINS["gpt"],
        progress=False,
    )


@pytest.mark.parametrize(("tensor", "data"), [(2, 1), (8, 3)])
def test_the_forms_of_stages_in_degrees_are_the_figures_there(tensor: int, data: int) -> None:
    costs = split().costs
    assert costs.over_ranks.ranks == (2, 4, 8)
    sizes = {"b": 4, "s": 24, "t": tensor, "d": data} | dict(costs.names)
    given = [(symbol(letter), size) for letter, size in sizes.items()]
    found = costs.at(batch=4, sequence=24, tensor=tensor, data=data)
    sums = [rank.nbytes for rank in found.averaged] or [0] * len(found.stages)
    stages = zip(costs.named_stages, found.stages, sums, strict=True)
    for j, (forms, figures, averaged) in enumerate(stages):
        said = {field: float(getattr(forms, field).subs(given)) for field in FIELDS}
        assert said["flops_forward"] == figures.forward_flops
        assert said["flops_backward"] == figures.backward_flops
        assert said["saved"] == figures.activations
        assert said["message"] == figures.sent
        sent = 2 * averaged * (data - 1) / data
        assert float(forms.averaged.subs(given)) == pytest.approx(sent)
        assert (said["sent_backward"] > said["sent_forward"]) == (j == 1)  # it runs twice


@pytest.mark.parametrize(
    ("heads", "exact"), [pytest.param(16, (2, 4, 8), marks=SWEEP), (8, (2, 4))]
)
def test_the_forms_of_blocks_in_tensor_ranks_are_those_found_for_so_many(
    heads: int, exact: tuple[int, ...]
) -> None:
    program = split(heads)
    costs = program.costs
    assert costs.over_ranks.ranks == exact  # where each rank has one head other operators run
    whole, plan = with_tensor(program.problem, program.plan, exact[-1])
    there = Costs(whole, plan).templates
    given = [(symbol(letter), size) for letter, size in {"t": exact[-1], **costs.names}.items()]
    for name, forms in costs.named.items():
        for field in FIELDS:
            expected = getattr(there[name], field)
            assert (getattr(forms, field).subs(given) - expected).expand() == 0
    assert "b*h**2*s/t" in str(costs.named["Layer"].flops_forward)


def test_forms_that_are_wrong_on_other_ranks_are_refused() -> None:
    costs = split(8).costs
    check_ranks(costs.over_ranks, {2: costs.rank_costs})
    with pytest.raises(Unfit, match="flops_forward of Layer on 2, 4 ranks does not tell it"):
        check_ranks(costs.over_ranks, {3: costs.rank_costs})


def test_ranks_that_do_not_tell_a_form_are_named() -> None:
    costs = program_of("gpt", 2, 32, "bf16", "vocab-2", (2, 2, 1)).costs  # 4 heads
    assert costs.over_ranks.ranks == ()
    said = "too few numbers of ranks run the same operators on even pieces (2)"
    assert costs.over_ranks.reason == said


def test_the_report_says_the_forms_of_blocks_and_stages_in_degrees() -> None:
    report = split().report(forms=True)
    letters = {item.letter: item.word for item in report.symbols}
    assert letters["t"] == "tensor ranks, exact for 2, 4, 8"
    assert letters["d"] == "data ranks"
    said = {(item.name, item.what): item.value for item in report.forms}
    assert said["stage 0", "bytes to other stages"] == "4*b*h*s"
    averaged = said["stages 2, 3", "bytes to data ranks, once a step"]
    assert averaged == "(d - 1)*(40*h**2 + 56*h**2/t + 48*h + 56*h/t)/d"
    assert ("stage 2", "bytes saved") not in said
