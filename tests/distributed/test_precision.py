"""Training in 16 bits follows the same recipe in one process, written in plain torch."""

import copy
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parcompiler as pc
from parcompiler.models import gpt
from parcompiler.verification.batches import random_batch
from parcompiler.verification.pool import Job, Outcome, pool
from tests import zoo
from tests.distributed import recipe

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MICROBATCHES, STEPS, RATE = 2, 100, 5e-4
MANY = 384  # micro-batches: sums in bfloat16 are 1.6 to 2.8 % off
LIMIT = 2e-2


@cache
def compiled(name: str, precision: str, vocabulary: str = "whole") -> pc.Program:
    model, inputs = zoo.build(name)
    return pc.compile(
        model, pc.Mesh(pipeline=2), inputs,
        microbatches=MICROBATCHES, precision=precision, vocabulary=vocabulary, schedule="1f1b",
    )  # fmt: skip


def batches(program: pc.Program, steps: int) -> list[dict[str, torch.Tensor]]:
    """A few batches over and over, so there is to be learnt; in float32 as loaders have them."""
    graph = program.problem.graph
    different = [random_batch(graph, MICROBATCHES, seed) for seed in range(min(steps, 4))]
    for batch in different:
        for key, tensor in batch.items():
            batch[key] = tensor.float() if tensor.is_floating_point() else tensor
    return [different[step % len(different)] for step in range(steps)]


def on_ranks(program: pc.Program, folder: Path, steps: int, **more: Any) -> Outcome:
    path = program.export(folder / "program")
    options = {"lr": RATE}
    job = Job(str(path), batches(program, steps), optimizer="AdamW", options=options, **more)
    return pool().run(job, program.lowered.grid.size)


def follows(name: str, precision: str, vocabulary: str, folder: Path, **more: Any) -> None:
    program = compiled(name, precision, vocabulary)
    found = on_ranks(program, folder, STEPS, **more)
    model = copy.deepcopy(program.model)
    assert model is not None
    scale = 2.0**16 if precision == "fp16" else 1.0
    wanted = recipe.train(
        model,
        batches(program, STEPS),
        MICROBATCHES,
        DTYPES[precision],
        scale=scale,
        lr=RATE,
        **more,
    )
    losses = torch.tensor(wanted.losses)
    assert losses[-1] < losses[0] - 0.1, "nothing was learnt"
    assert float(((found.losses - losses) / losses).abs().max()) <= LIMIT
    assert found.scale == wanted.scale
    assert {tensor.dtype for tensor in found.state.values()} <= {torch.float32, torch.int64}
    exact = {name: p for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert exact.keys() <= found.state.keys()


@pytest.mark.parametrize("precision", DTYPES)
def test_a_hundred_steps_have_the_losses_of_one_process(precision: str, tmp_path: Path) -> None:
    follows("gpt-tied", precision, "vocab-2", tmp_path, max_norm=1.0)


@pytest.mark.sweep
@pytest.mark.parametrize("vocabulary", ["whole", "vocab-1"])
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", ["gpt", "llama", "t5", "resnet"])
def test_models_follow_one_process(
    name: str, precision: str, vocabulary: str, tmp_path: Path
) -> None:
    follows(name, precision, vocabulary, tmp_path)


def test_masters_are_the_weights_to_the_last_bit(tmp_path: Path) -> None:
    program = compiled("gpt-tied", "bf16")
    path = program.export(tmp_path / "program")
    job = Job(str(path), batches(program, 1), options={"lr": 0.0})
    found = pool().run(job, 2)
    assert program.model is not None
    for name, parameter in program.model.named_parameters():
        assert torch.equal(found.state[name], parameter.detach()), name


def test_gradients_are_those_of_the_loss_without_its_scale(tmp_path: Path) -> None:
    program = compiled("gpt-tied", "fp16")
    path = program.export(tmp_path / "program")
    found = [
        pool().run(Job(str(path), batches(program, 1), scale=scale), 2)
        for scale in (2.0**12, 2.0**8)
    ]
    for name, gradient in found[0].gradients.items():
        assert gradient.dtype == torch.float32
        limit = 1e-2 * float(gradient.abs().max()) + 1e-6
        assert float((gradient - found[1].gradients[name]).abs().max()) <= limit, name


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (pc.Mesh(pipeline=2), {"schedule": "zb-h1", "vocabulary": "vocab-1"}),
        (pc.Mesh(tensor=2), {}),
        (pc.Mesh(data=2), {"zero": 1}),
        (pc.Mesh(data=2), {"zero": 2}),
    ],
)
def test_gradients_of_many_microbatches_are_added_up_in_float32(
    mesh: pc.Mesh, options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = gpt.Config(layers=2, heads=2, hidden=8, vocabulary=16, sequence=4)
    model = gpt.GPT(config)
    one = {key: torch.randint(16, (1, 4)) for key in ("tokens", "labels")}
    each, count = MANY // mesh.data, MANY
    program = pc.compile(model, mesh, one, microbatches=each, precision="bf16", **options)
    batch = random_batch(program.problem.graph, count, seed=0)
    job = Job(str(program.export(tmp_path / "program")), [batch], options={"lr": 0.0})
    found = pool().run(job, program.lowered.grid.size)
    recipe.train(model, [batch], count, torch.bfloat16, lr=0.0)
    named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    error = sum(float((found.gradients[n] - wanted).square().sum()) for n, wanted in named.items())
    size = sum(float(wanted.square().sum()) for wanted in named.values())
    assert math.sqrt(error / size) <= 1e-2


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"data": 2}, {"zero": 0}),
        ({"data": 2}, {"zero": 1}),
        ({"data": 2}, {"zero": 3}),
        ({"data": 2}, {"updates": "parameter-server"}),
        ({"data": 2, "pipeline": 2}, {"zero": 0}),
    ],
)
def test_gradients_of_data_ranks_are_added_up_in_float32(
    mesh: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    # What one data rank makes of two micro-batches two make of one each, to the last bit.
    captured = zoo.captured("gpt", "bf16")
    batch = [random_batch(captured.problem.graph, 2, seed=0)]
    one = pc.Mesh(pipeline=mesh.get("pipeline", 1))
    given: dict[str, Any] = {"schedule": "gpipe", "vocabulary": "whole", "precision": "bf16"}
    programs = [
        pc.compile(captured, one, microbatches=2, **given),
        pc.compile(captured, pc.Mesh(**mesh), microbatches=1, **given, **options),
    ]
    alone, shared = (
        pool().run(
            Job(str(program.export(tmp_path / str(k))), batch, options={"lr": 0.0}),
            program.lowered.grid.size,
        )
        for k, program in enumerate(programs)
    )
    assert alone.gradients.keys() == shared.gradients.keys()
    for name, gradient in alone.gradients.items():
        assert torch.equal(gradient, shared.gradients[name]), name
    assert any(
        not torch.equal(gradient, gradient.to(torch.bfloat16).float())
        for gradient in alone.gradients.values()
    )


@pytest.mark.parametrize("precision", DTYPES)
def test_verify_compares_16_bits_and_float64(precision: str) -> None:
    found = compiled("gpt-tied", precision).verify()
    assert found.ok, str(found)
    assert found.native.dtype == str(DTYPES[precision]).removeprefix("torch.")
    assert found.lifted is not None
    assert found.gradient_error <= 1e-9


class Steep(nn.Module):
    """Its first layer has gradients much larger than those of the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        nn.init.constant_(self.layers.get_parameter("0.weight")[:, 0], 1e-4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x).tanh()
        for layer in list(self.layers)[1:]:
            x = layer(x)
        return F.mse_loss(x, y)


def steep() -> tuple[pc.Program, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, batch = Steep(), {"x": 0.01 * torch.randn(4, 8), "y": torch.randn(4, 8)}
    batch["x"][:, 0] = 4e4 * batch["x"][:, 1]
    program = pc.compile(
        model, pc.Mesh(pipeline=2), batch, microbatches=1, precision="fp16", stages=(1, 3),
        schedule="1f1b",
    )  # fmt: skip
    return program, batch


def test_a_gradient_that_is_infinite_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    program, batch = steep()
    assert program.model is not None
    model = copy.deepcopy(program.model)
    model(**batch).backward()
    sizes = {
        n: float(p.grad.abs().max()) for n, p in model.named_parameters() if p.grad is not None
    }
    own = {name for name, _ in program.model.named_parameters() if name.startswith("layers.0")}
    largest = max(size for name, size in sizes.items() if name not in own)
    assert sizes["layers.0.weight"] > 8 * largest
    scale = 2.0 ** int(math.log2(65504 / 2 / largest))  # what the other rank has is finite
    assert scale * sizes["layers.0.weight"] > 2 * 65504
    path = program.export(tmp_path / "program")
    options = {"lr": 0.1}
    skipped = pool().run(Job(str(path), [batch], options=options, scale=scale), 2)
    assert skipped.scale == scale / 2
    finite = {name: bool(g.isfinite().all()) for name, g in skipped.gradients.items()}
    assert not finite["layers.0.weight"]
    assert all(found for name, found in finite.items() if name not in own)
    for name, parameter in model.named_parameters():
        assert torch.equal(skipped.state[name], parameter.detach()), name
    later = pool().run(Job(str(path), [batch] * 8, options=options, scale=scale), 2)
    assert later.scale < skipped.scale
    assert all(not torch.equal(later.state[n], p.detach()) for n, p in model.named_parameters())
