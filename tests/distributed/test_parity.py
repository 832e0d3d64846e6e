"""Every plan computes what the original model computes: loss, gradients, a step, buffers.

Real processes on this machine, one pool for all tests; see parcompiler/verification/.
"""

import pytest

import parcompiler as pc
from parcompiler import schedules
from tests import zoo

SCHEDULES = tuple(name for name in schedules.SCHEDULES if name != "pipedream")
CROSSING = ("gpt", "t5", "hf-gpt2")  # tied weights, values that skip stages, transposed weights
# These have no sum whose order the division changes: a tensor on two stages, or (Llama, Qwen,
# Mixtral) a causal mask that Hugging Face leaves to the attention kernel only when not traced.
BITWISE = {"gpt", "gpt-dropout", "llama", "resnet", "hf-vit", "hf-resnet"}


def check(name: str, pipeline: int, schedule: str, microbatches: int) -> None:
    program = pc.compile(
        zoo.captured(name), pc.Mesh(pipeline=pipeline), schedule=schedule, microbatches=microbatches
    )
    found = program.verify()
    assert found.ok, str(found)
    assert found.native.limit <= 1e-5
    assert found.lifted is not None, found.note
    assert max(found.loss_error, found.gradient_error, found.parameter_error) <= 1e-9
    assert found.evaluation_error is not None
    assert found.evaluation_error <= 1e-9
    if name in BITWISE:
        assert found.native.bitwise, str(found)


@pytest.mark.parametrize("name", zoo.ALL)
def test_every_model_equals_one_process(name: str) -> None:
    check(name, 4, "1f1b", 3)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CROSSING)
def test_every_schedule_equals_one_process(name: str, schedule: str) -> None:
    check(name, 4, schedule, 3)


@pytest.mark.sweep
@pytest.mark.parametrize("microbatches", ["1", "2", "p", "4p"])
@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CROSSING)
def test_every_schedule_with_few_and_many_microbatches(
    name: str, schedule: str, pipeline: int, microbatches: str
) -> None:
    check(
        name,
        pipeline,
        schedule,
        {"p": pipeline, "4p": 4 * pipeline}.get(microbatches) or int(microbatches),
    )


@pytest.mark.sweep
@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize("name", zoo.ALL)
def test_everything_with_everything(
    name: str, pipeline: int, schedule: str, microbatches: int
) -> None:
    check(name, pipeline, schedule, microbatches)
