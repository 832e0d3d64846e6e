"""Programs with recomputation compute what the original model computes; see test_parity."""

from functools import cache

import pytest

import parcompiler as pc
from tests import zoo

BITWISE = {"gpt-dropout", "llama", "resnet"}  # as without recomputation: see test_parity


@cache
def captured(name: str) -> pc.Program:
    model, inputs = zoo.build(name)
    return pc.compile(model, pc.Mesh(), inputs, microbatches=1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("name", ["gpt-dropout", "llama", "resnet", "t5"])
def test_a_program_that_recomputes_equals_one_process(name: str, schedule: str) -> None:
    program = pc.compile(
        captured(name), pc.Mesh(pipeline=2), schedule=schedule, microbatches=3, recompute="full"
    )
    assert program.plan.recompute
    found = program.verify()
    assert found.ok, str(found)
    assert max(found.loss_error, found.gradient_error, found.parameter_error) <= 1e-9
    if name in BITWISE:
        assert found.native.bitwise, str(found)


def test_some_layers_may_be_recomputed() -> None:
    patterns = {"layers.*": True, "layers.1": False, "layers.3.ffn": False}
    program = pc.compile(
        captured("gpt-dropout"), pc.Mesh(pipeline=2), microbatches=3, recompute=patterns
    )
    assert program.plan.recompute
    assert not any(name.startswith("layers.1") for name in program.plan.recompute)
    found = program.verify()
    assert found.native.bitwise, str(found)
