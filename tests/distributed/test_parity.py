"""Every plan computes what the original model computes: loss, gradients, a step, buffers.

Real processes on this machine, one pool for all tests; see parcompiler/verification.py.
"""

from functools import cache

import pytest

import parcompiler as pc
from tests import zoo

SCHEDULES = ("naive", "gpipe", "1f1b")
# These have no sum whose order the division changes: a tensor on two stages, or (Llama, Qwen,
# Mixtral) a causal mask that Hugging Face leaves to the attention kernel only when not traced.
BITWISE = {"gpt", "gpt-dropout", "llama", "resnet", "hf-vit", "hf-resnet"}


@cache
def captured(name: str) -> pc.Program:
    """The model compiled for one rank, so that other meshes need not capture it again."""
    model, inputs = zoo.build(name)
    return pc.compile(model, pc.Mesh(), inputs, microbatches=1)


def check(name: str, pipeline: int, schedule: str, microbatches: int) -> None:
    program = pc.compile(
        captured(name), pc.Mesh(pipeline=pipeline), schedule=schedule, microbatches=microbatches
    )
    found = program.verify()
    assert found.ok, str(found)
    assert found.native.limit <= 1e-5
    if name == "hf-mixtral":
        assert "float64" in found.note
    else:
        assert max(found.loss_error, found.gradient_error, found.parameter_error) <= 1e-9
    if name in BITWISE:
        assert found.native.bitwise, str(found)


@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize("name", zoo.ALL)
def test_every_model_equals_one_process(name: str, pipeline: int) -> None:
    check(name, pipeline, "1f1b", 3)


@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["gpt-tied", "t5"])
def test_every_schedule_equals_one_process(name: str, schedule: str, microbatches: int) -> None:
    check(name, 4, schedule, microbatches)


@pytest.mark.sweep
@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize("name", zoo.ALL)
def test_everything_with_everything(
    name: str, pipeline: int, schedule: str, microbatches: int
) -> None:
    check(name, pipeline, schedule, microbatches)
