"""On expert ranks, each with a piece of the experts, a program computes what the model does.

That tokens are exchanged is read from the emitted layers, and that pieces are held from shapes.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import parcompiler as pc
from tests import zoo
from tests.architecture_text import CAUSAL

FEW: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("moe", {"data": 4, "expert": 2}, {}),
    ("hf-mixtral", {"data": 4, "expert": 4}, {}),
    ("gpt-oss", {"pipeline": 2, "data": 2, "expert": 2}, {"recompute": "full"}),
]
MODELS = ("moe", "hf-mixtral", "qwen3-moe", "olmoe", "gpt-oss", "deepseek-v3")
LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"data": 2, "expert": 2}, {}),
    ({"data": 4, "expert": 4}, {}),
    ({"data": 4, "expert": 2}, {"recompute": "full"}),
    ({"pipeline": 2, "data": 2, "expert": 2}, {"schedule": "zb-h1"}),
]


def compiled(name: str, mesh: dict[str, Any], **options: Any) -> pc.Program:
    torch.manual_seed(0)
    model, inputs, *_ = zoo.build(name) if name in zoo.ALL else CAUSAL[name]()
    options = {"microbatches": 2, "precision": "fp64", "progress": False, **options}
    return pc.compile(model.train(), pc.Mesh(**mesh), inputs, **options)


def check(program: pc.Program) -> None:
    found = program.verify()
    assert found.ok, str(found)
    assert max(found.loss_error, found.gradient_error, found.parameter_error) <= 1e-9


@pytest.mark.parametrize(("name", "mesh", "options"), FEW)
def test_expert_ranks_train_as_the_model_does(
    name: str, mesh: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    program = compiled(name, mesh, **options)
    program.export(tmp_path)
    text = "".join(path.read_text() for path in sorted(tmp_path.glob("stage_*.py")))
    assert ("runtime.all_to_all(" if name == "moe" else "runtime.dispatch(") in text
    pieces = [item for item in program.lowered.graph.parameters if item.experts]
    assert pieces
    assert all(item.shape[0] * mesh["expert"] == item.experts for item in pieces)
    check(program)


@pytest.mark.parametrize(
    ("name", "mesh", "options", "words"),
    [
        ("hf-mixtral", {"data": 8, "expert": 8}, {}, r"4 experts .*more ranks than experts"),
        ("hf-mixtral", {"data": 3, "expert": 3}, {}, r"expert=3 does not divide the 4 experts"),
        ("gpt", {"data": 2, "expert": 2}, {}, r"expert=2 divides experts, and GPT has none"),
        ("moe", {"data": 2, "expert": 2}, {"zero": 1}, r"take zero=0"),
        ("moe", {"data": 2, "expert": 2, "tensor": 2}, {}, r"take tensor=1"),
        ("moe", {"data": 2, "expert": 2}, {"updates": "local"}, r"take updates='all-reduce'"),
    ],
)
def test_what_expert_ranks_cannot_do_is_refused_by_name(
    name: str, mesh: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(pc.InputError, match=words):
        compiled(name, mesh, **options)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_trains_as_the_model_does(name: str, layout: int) -> None:
    mesh, options = LAYOUTS[layout]
    check(compiled(name, mesh, **options))
