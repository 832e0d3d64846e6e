"""Plain models with something special compute on two and four stages what they compute on one."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import parcompiler as pc
from tests.distributed.models import (
    CLASSES,
    MODELS,
    WIDTH,
    XY,
    Shared,
    SparseTables,
    Stack,
    TiedThrice,
    classes,
)


def check(program: pc.Program) -> None:
    found = program.verify()
    assert found.ok, str(found)
    assert found.lifted is not None
    assert max(found.loss_error, found.gradient_error, found.parameter_error) <= 1e-9
    assert found.evaluation_error is None or found.evaluation_error <= 1e-9


@pytest.mark.parametrize("name", MODELS)
def test_a_special_model_equals_one_process(name: str) -> None:
    make, inputs, loss = MODELS[name]
    torch.manual_seed(0)
    model = make()
    before = copy.deepcopy(model.state_dict())
    program = pc.compile(model, pc.Mesh(pipeline=2), inputs, loss=loss, microbatches=3)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), f"compile changed {key}"
    check(program)


def test_tensors_on_many_stages_are_one_tensor() -> None:
    inputs = {"tokens": classes(16), "labels": classes(16)}
    for model, batch in ((TiedThrice(), inputs), (Shared(), XY)):
        program = pc.compile(model, pc.Mesh(pipeline=4), batch, stages="even", microbatches=3)
        assert any(len(item.ranks) >= 3 for item in program.lowered.tied)
        check(program)


def test_a_double_model_is_verified_in_double() -> None:
    batch = {"x": XY["x"].double(), "labels": XY["labels"]}
    program = pc.compile(Stack().double(), pc.Mesh(pipeline=2), batch, microbatches=3)
    found = program.verify()
    assert found.native.dtype == "float64"
    assert found.native.bitwise


def test_a_meta_model_is_verified_with_small_random_weights() -> None:
    with torch.device("meta"):
        model = Stack(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        batch = {"x": torch.empty(4, WIDTH), "labels": torch.empty(4, dtype=torch.long)}
    check(pc.compile(model, pc.Mesh(pipeline=2), batch, microbatches=3))
    assert model.head.weight.shape == (CLASSES, WIDTH)
    assert model.head.weight.is_meta


@pytest.mark.parametrize("mesh", [pc.Mesh(data=2), pc.Mesh(pipeline=2), pc.Mesh(tensor=2)])
def test_sparse_tables_have_gradients_of_all_rows_and_that_is_said(
    mesh: pc.Mesh, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    tokens, labels = torch.randint(20, (6,)), torch.randint(CLASSES, (6,))
    program = pc.compile(SparseTables(), mesh, (tokens, labels), microbatches=2)
    assert (
        "sparse=True (2: table.weight, ...) have all rows in this program"
        in capsys.readouterr().err
    )
    program.export(tmp_path)
    assert "sparse" not in "".join(path.read_text() for path in tmp_path.glob("stage_*.py"))
    check(program)
