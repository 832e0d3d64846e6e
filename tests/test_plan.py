"""Plans: JSON that reads back, the same bytes for the same plan, and errors that name the field."""

import dataclasses
import json
from typing import Any

import pytest

import parcompiler as pc
from parcompiler.plan import Shape, Solution, StageChoice

PLAN = pc.Plan(
    model="GPT",
    fingerprint="0f",
    mesh=Shape(pipeline=2, device="cpu"),
    microbatches=8,
    precision="fp64",
    schedule="1f1b",
    granularity=1,
    sent=("mask",),
    stages=(StageChoice(("a", "b"), 0), StageChoice(("c",), 1)),
    solution=Solution("optimal", 1.5, 1.5, 0.0),
)


MESH = {"pipeline": 2, "tensor": 1, "data": 1, "microbatches": 8}


def changed(**fields: Any) -> str:
    return json.dumps(json.loads(PLAN.to_json()) | fields)


def test_a_plan_reads_back_equal_with_the_same_bytes() -> None:
    text = PLAN.to_json()
    assert pc.Plan.from_json(text) == PLAN
    assert pc.Plan.from_json(text).to_json() == text
    assert text.endswith("}\n")
    assert list(json.loads(text)) == sorted(json.loads(text))


def test_an_undecided_plan_reads_back_too() -> None:
    plan = pc.Plan(model="GPT", fingerprint="", mesh=Shape(), microbatches=1)
    assert pc.Plan.from_json(plan.to_json()) == plan


def test_the_devices_of_the_pipeline_read_back() -> None:
    plan = dataclasses.replace(PLAN, mesh=Shape(pipeline=2, device=("h100", "l40s")))
    assert pc.Plan.from_json(plan.to_json()) == plan
    assert plan.mesh.devices == ("h100", "l40s")
    assert PLAN.mesh.devices == ("cpu", "cpu")


def test_fields_with_defaults_may_be_left_out() -> None:
    text = '{"model": "m", "fingerprint": "f", "mesh": {"pipeline": 2}, "microbatches": 4}'
    assert pc.Plan.from_json(text) == pc.Plan("m", "f", Shape(pipeline=2), 4)


def test_a_whole_number_is_a_number() -> None:
    solution = {"status": "given", "objective": 2, "bound": 0, "gap": 1}
    assert pc.Plan.from_json(changed(solution=solution)).solution == Solution("given", 2.0, 0.0, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"microbatches": "8"}, r'plan\.microbatches must be an integer \("8" found\)'),
        ({"microbatches": True}, r"plan\.microbatches must be an integer \(true found\)"),
        ({"microbatches": 2.5}, r"plan\.microbatches must be an integer \(2\.5 found\)"),
        ({"microbatches": None}, r"plan\.microbatches must be an integer \(null found\)"),
        ({"model": 3}, r"plan\.model must be a string \(3 found\)"),
        ({"mesh": []}, r"plan\.mesh must be an object \(\[\] found\)"),
        ({"mesh": {"rings": 2}}, r"plan\.mesh has an unknown field 'rings' \(known: context, data"),
        ({"stages": {}}, r"plan\.stages must be a list"),
        ({"stages": [{"blocks": ["a"]}]}, r"plan\.stages\[0\] lacks the field 'rank'"),
        ({"stages": [{"blocks": "a", "rank": 0}]}, r"plan\.stages\[0\]\.blocks must be a list"),
        (
            {"stages": [{"blocks": ["a", 1], "rank": 0}]},
            r"plan\.stages\[0\]\.blocks\[1\] must be a string",
        ),
        ({"solution": {"status": "optimal"}}, r"plan\.solution lacks the field 'objective'"),
        ({"colour": "red"}, r"plan has an unknown field 'colour' \(known: context, costs, "),
        (
            {"mesh": {"pipeline": 2, "device": ["h100"]}},
            r"plan\.mesh\.device must name 2 devices, or one \(1 found\)",
        ),
        ({"mesh": {"device": None}}, r"plan\.mesh\.device must be "),
        ({"mesh": {"device": ["cpu", 3]}}, r"plan\.mesh\.device\[1\] must be a string"),
        ({"mesh": {"data": -1, "tensor": -1}}, r"plan\.mesh: mesh axis 'tensor' must be "),
        ({"mesh": {"context": 10**30}}, r"plan\.mesh: mesh axis 'context' may be at most 1,048"),
        ({"mesh": {"data": 2, "expert": 4}}, r"plan\.mesh: expert ranks .* expert=4 must divide"),
        (
            {"weighed": [{"schedule": "1f1b", "virtual_stages": 1, "seconds": -3}]},
            r"plan\.weighed\[0\]\.seconds must be at least 0 \(-3\.0 found\)",
        ),
        (
            {"runner_up": {**MESH, "memory": -1}},
            r"plan\.runner_up\.memory must be at least 0 \(-1 found\)",
        ),
        ({"version": 99}, r"version 99; this release reads version 1"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(pc.InputError, match=message):
        pc.Plan.from_json(changed(**fields))


@pytest.mark.parametrize("text", ["", "{", "plan", "[1"])
def test_text_that_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(pc.InputError, match="the plan is no JSON"):
        pc.Plan.from_json(text)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"plan"'])
def test_json_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(pc.InputError, match="plan must be an object"):
        pc.Plan.from_json(text)


def test_a_long_name_of_a_field_is_shortened() -> None:
    text = changed(**{"x" * 100_000: 1})
    with pytest.raises(pc.InputError, match=r"^plan has an unknown field .{,1000}$"):
        pc.Plan.from_json(text)


@pytest.mark.parametrize("missing", ["model", "fingerprint", "mesh", "microbatches"])
def test_a_missing_field_is_named(missing: str) -> None:
    data = json.loads(PLAN.to_json())
    del data[missing]
    with pytest.raises(pc.InputError, match=f"plan lacks the field '{missing}'"):
        pc.Plan.from_json(json.dumps(data))
