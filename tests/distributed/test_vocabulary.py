"""With the vocabulary on all ranks a program computes what the model computes.

Every method, under schedules that order the rest in every way; tied tables and several, bias, soft
caps, shifted labels, tables of an odd size; a tensor and a data axis; and evaluation, steps and
failures.
"""

from functools import cache

import pytest

import parcompiler as pc
from tests import architectures, zoo

METHODS = ("naive", "vocab-1", "vocab-2", "interlaced")
SCHEDULES = ("1f1b", "v-half", "gpipe", "interleaved")
FURTHER = ("naive", "zb-h1", "zb-h2", "zb-v", "v-min")
# Tied and not; a bias; two lookups of one table; grouped heads; a soft cap, tied; experts.
MODELS = (
    "gpt", "gpt-tied", "gpt-dropout", "llama", "bert", "t5", "hf-gpt2", "hf-llama",
    "gemma2", "hf-bert", "hf-t5", "hf-bart", "hf-mixtral", "hf-opt", "hf-qwen3", "hf-albert",
)  # fmt: skip
OFTEN = [
    ("gpt-tied", "vocab-2", "1f1b", 2, 1), ("gpt", "vocab-1", "v-half", 2, 4),
    ("gpt-dropout", "naive", "gpipe", 2, 3), ("gpt-tied", "interlaced", "1f1b", 4, 8),
    ("t5", "vocab-2", "interleaved", 2, 4), ("bert", "vocab-1", "1f1b", 4, 6),
    ("hf-gpt2", "vocab-2", "v-half", 4, 9), ("gemma2", "vocab-1", "zb-h1", 2, 4),
    ("hf-bart", "vocab-2", "gpipe", 2, 2), ("hf-bert", "naive", "1f1b", 2, 5),
    ("hf-mixtral", "vocab-2", "1f1b", 2, 3), ("gpt-dropout", "vocab-1", "search", 3, 4),
]  # fmt: skip
MESHES = [(2, 2, 1), (2, 1, 2), (2, 2, 2), (1, 2, 1)]  # pipeline, tensor, data


@cache
def captured(name: str) -> pc.Program:
    """The model compiled for one rank, so that other meshes need not capture it again."""
    if name in zoo.ALL:
        return zoo.captured(name)
    model, inputs, loss = architectures.build(name)
    return pc.compile(model, pc.Mesh(), inputs, loss, microbatches=1)


def check(name: str, method: str, schedule: str, mesh: pc.Mesh, microbatches: int) -> pc.Program:
    program = pc.compile(
        captured(name), mesh, schedule=schedule, vocabulary=method, microbatches=microbatches,
        passes=zoo.SHORT if schedule == "search" else None,
    )  # fmt: skip
    choice = program.plan.vocabulary
    if mesh.pipeline > 1:
        assert choice is not None
        assert (choice.method, choice.spread) == (method, True), choice
    found = program.verify()
    assert found.ok, str(found)
    assert found.lifted is not None, found.note
    assert max(found.loss_error, found.gradient_error, found.parameter_error) <= 1e-9
    return program


@pytest.mark.parametrize(("name", "method", "schedule", "pipeline", "microbatches"), OFTEN)
def test_the_vocabulary_on_all_ranks_equals_one_process(
    name: str, method: str, schedule: str, pipeline: int, microbatches: int
) -> None:
    check(name, method, schedule, pc.Mesh(pipeline=pipeline), microbatches)


@pytest.mark.parametrize(("pipeline", "tensor", "data"), MESHES)
def test_it_composes_with_tensor_and_data_ranks(pipeline: int, tensor: int, data: int) -> None:
    mesh = pc.Mesh(pipeline=pipeline, tensor=tensor, data=data)
    check("gpt-tied", "vocab-2", "1f1b", mesh, 3)


@pytest.mark.sweep
@pytest.mark.parametrize("microbatches", [1, 2, "p", "p + 2", "4p"])
@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize("schedule", [*SCHEDULES, *FURTHER])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["gpt-tied", "t5"])
def test_every_method_under_every_schedule(
    name: str, method: str, schedule: str, pipeline: int, microbatches: int | str
) -> None:
    counts = {"p": pipeline, "p + 2": pipeline + 2, "4p": 4 * pipeline}
    count = counts[microbatches] if isinstance(microbatches, str) else microbatches
    check(name, method, schedule, pc.Mesh(pipeline=pipeline), count)


@pytest.mark.sweep
@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_with_every_method(
    name: str, method: str, schedule: str, pipeline: int
) -> None:
    check(name, method, schedule, pc.Mesh(pipeline=pipeline), pipeline + 3)


@pytest.mark.sweep
@pytest.mark.parametrize(("pipeline", "tensor", "data"), [(2, 2, 1), (2, 1, 2)])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_with_tensor_and_data_ranks(
    name: str, method: str, pipeline: int, tensor: int, data: int
) -> None:
    check(name, method, "1f1b", pc.Mesh(pipeline=pipeline, tensor=tensor, data=data), 4)
