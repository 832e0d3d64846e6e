"""Hooks of parameters run on the gradients of the whole batch, wherever these are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import parcompiler as pc
from parcompiler.capture import capture
from parcompiler.codegen.functions import hooks_module
from parcompiler.errors import CaptureError
from parcompiler.verification.batches import piece, random_batch
from parcompiler.verification.pool import Job, pool
from tests import zoo

MICROBATCHES = 2


def limited(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-1e-3, 2e-3) * 3 + 1e-4


def without_small_ones(gradient: torch.Tensor) -> torch.Tensor:
    return torch.where(gradient.abs() < 1e-3, torch.zeros_like(gradient), gradient)


def hooked() -> tuple[nn.Module, dict[str, Any]]:
    """A model whose tied table has two hooks, and a matrix one."""
    model, inputs = zoo.build("gpt-tied")
    named = dict(model.named_parameters())
    named["embedding.weight"].register_hook(limited)
    named["embedding.weight"].register_hook(without_small_ones)
    named["layers.0.attention.qkv.weight"].register_hook(limited)
    return model, inputs


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (pc.Mesh(pipeline=2), {"vocabulary": "whole"}),
        (pc.Mesh(pipeline=2), {"vocabulary": "vocab-2"}),
        (pc.Mesh(data=2), {}),
        (pc.Mesh(tensor=2), {"sharding": {"*qkv.weight": "S(0)", "*up.weight": "S(0)"}}),
        (pc.Mesh(pipeline=2), {"precision": "bf16"}),
    ],
    ids=["tied stages", "rows", "data", "pieces", "bf16"],
)
def test_programs_have_the_gradients_that_hooks_make(mesh: pc.Mesh, options: Any) -> None:
    model, inputs = hooked()
    program = pc.compile(model, mesh, inputs, microbatches=MICROBATCHES, **options)
    assert set(program.captured.hooks) >= {"embedding.weight"}
    found = program.verify()
    assert found.ok, str(found)
    assert max(found.gradient_error, found.parameter_error) <= 1e-9


def test_they_come_before_clipping_and_after_the_last_micro_batch(tmp_path: Path) -> None:
    model, inputs = hooked()
    program = pc.compile(
        model, pc.Mesh(pipeline=2), inputs, microbatches=MICROBATCHES, precision="fp64"
    )
    batch = random_batch(program.problem.graph, MICROBATCHES, seed=0)
    path = program.export(tmp_path / "program")
    found = pool().run(Job(str(path), [batch], max_norm=1e-3), 2)
    model.double()
    losses = [model(**piece(program.captured, batch, i)) for i in range(MICROBATCHES)]
    torch.stack(losses).mean().backward()  # once, so that hooks see what all have made together
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(found.gradients[name], parameter.grad, rtol=1e-9, atol=1e-15), name
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert found.norms is not None
    assert torch.allclose(found.norms[0], norm, rtol=1e-9)


def test_emitted_code_reads_like_the_hook(golden: Any) -> None:
    model, inputs = hooked()
    graph = capture(model, inputs)
    hooks = {n: replace(h, places=("limited, model.py:3",)) for n, h in graph.hooks.items()}
    golden("codegen/hooks/hooks.py", hooks_module(replace(graph, hooks=hooks), "cpu"))


MASK = torch.ones(4, 4)
CALLS: list[int] = []


def counted(gradient: torch.Tensor) -> torch.Tensor:
    CALLS.append(1)
    return gradient * len(CALLS)


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        (lambda g: g / g.norm(), "linalg_vector_norm"),
        (lambda g: g - g.mean(0), "mean"),
        (lambda g: g * MASK, "a tensor besides the gradient"),
        (lambda g: None, "returns no tensor"),
        (lambda g: g.mul_(2), "in place"),
        (lambda g: g + torch.randn_like(g), "randn_like"),
        (lambda g: g.t(), "t.default|permute"),
        (lambda g: g.double(), "_to_copy"),
        (lambda g: g if g.sum() > 0 else -g, "data-dependent"),
        (counted, "something else when it runs again"),
    ],
)
def test_hooks_that_are_no_arithmetic_of_elements_are_refused(hook: Any, reason: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.get_parameter("0.weight").register_hook(hook)
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(model, (torch.ones(2, 4),), lambda y: y.mean())
    assert str(caught.value).startswith("'0.weight' has a hook that cannot run on the ranks")
    assert "test_hooks.py:" in str(caught.value)


def test_where_complete_gradients_are_not_kept_they_are_refused() -> None:
    model, inputs = zoo.build("gpt")
    next(model.parameters()).register_hook(limited)
    with pytest.raises(CaptureError, match="in float16 gradients are those of a scaled loss"):
        pc.compile(model, pc.Mesh(), inputs, precision="fp16")
    with pytest.raises(pc.InputError, match="take a synchronous schedule"):
        pc.compile(model, pc.Mesh(pipeline=2), inputs, schedule="pipedream")
