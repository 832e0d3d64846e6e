"""The proof itself: what it compares, with what, how it says so, and that it leaves no trace."""

import copy
import dataclasses
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import parcompiler as pc
from parcompiler.models import gpt
from parcompiler.verification.batches import random_batch
from parcompiler.verification.check import OPTIMIZER, OPTIONS
from parcompiler.verification.comparison import compare
from parcompiler.verification.pool import Job, Outcome, Pool
from parcompiler.verification.reference import Original, accumulated

X = {"x": torch.randn(3, 4, generator=torch.Generator().manual_seed(0))}


class Model(nn.Module):
    """Layers with running statistics, and an attribute that its forward writes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(self.norm(layer(x)))
        self.last = x.detach()
        return x.square().mean()


def compiled(model: nn.Module, mesh: pc.Mesh | None = None, **more: Any) -> pc.Program:
    return pc.compile(model, mesh or pc.Mesh(), X, **{"microbatches": 2, **more})


def outcome(**more: Any) -> Outcome:
    gradients = {"w": torch.ones(2), "v": torch.ones(2)}
    known = {"losses": torch.ones(1), "gradients": gradients, "state": {"w": torch.ones(2)}}
    return Outcome(**{**known, **more})


def errors(wanted: Outcome, found: Outcome) -> Any:
    return compare(wanted, found, ("w", "v"))


def test_devices_that_are_not_there_are_named() -> None:
    program = compiled(Model())
    with pytest.raises(pc.InputError, match="must be 'cpu' or 'cuda' \\('h100' given\\)"):
        program.verify(device="h100")
    if not torch.cuda.is_available():
        with pytest.raises(pc.InputError, match="no CUDA device"):
            program.verify(device="cuda")


def test_a_gradient_of_zeros_is_another_than_none() -> None:
    zeros = {"w": torch.ones(2), "v": torch.zeros(2), "u": torch.zeros(2)}
    one, more = outcome(gradients={"w": torch.ones(2)}), outcome(gradients=zeros)
    found = errors(one, more)
    assert not found.ok
    assert str(found) == "float32: only the program has a gradient of 'u' (and 1 more)"
    assert str(errors(more, one)) == "float32: only the model has a gradient of 'u' (and 1 more)"
    assert found.gradient == float("inf")


def test_what_is_not_finite_or_of_another_shape_is_said_in_words() -> None:
    broken = outcome(losses=torch.tensor([torch.nan]))
    assert str(errors(outcome(), broken)) == "float32: the loss is not finite in the program"
    other = outcome(state={"w": torch.ones(3)})
    text = "'w' after a step is of another shape or size (model and program: (2,) and (3,))"
    assert str(errors(outcome(), other)) == f"float32: {text}"


def test_the_step_has_decay_and_momentum() -> None:
    model = Model()
    program = compiled(model, precision="fp64")
    batch = random_batch(program.problem.graph, 2, seed=0)
    optimizer: Any = getattr(torch.optim, OPTIMIZER)
    with Original(program, 0, torch.float64) as original:
        found = accumulated(original, batch, 2, lambda p: optimizer(p, **OPTIONS))
    assert found.gradients["layers.0.weight"].abs().max() > 0
    for name, parameter in model.double().named_parameters():
        gradient = found.gradients[name] + OPTIONS["weight_decay"] * parameter.detach()
        step = (1 + OPTIONS["momentum"]) * gradient
        wanted = parameter.detach() - OPTIONS["lr"] * step
        assert torch.allclose(found.state[name], wanted, rtol=1e-12), name


def test_a_hook_that_the_program_has_not_is_noticed() -> None:
    model = Model()
    program = compiled(model)
    parameter = model.get_parameter("layers.0.weight")
    parameter.register_hook(lambda gradient: gradient * 0.5)
    found = program.verify()
    assert not found.ok
    assert found.worst == "layers.0.weight"


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_the_model_is_as_it_was(precision: str | None) -> None:
    model = Model()
    model(**X).backward()
    program = compiled(model, precision=precision)
    before, values = dict(vars(model)), copy.deepcopy(model.state_dict())
    gradients = [parameter.grad for parameter in model.parameters()]
    chance = torch.get_rng_state()
    assert program.verify().ok
    assert vars(model) == before
    assert all(torch.equal(values[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(chance, torch.get_rng_state())


def test_a_model_in_16_bits_is_judged_as_such() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=32, num_attention_heads=2,
        vocab_size=32,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).train()
    ids = torch.randint(32, (2, 8))
    program = pc.compile(model, pc.Mesh(data=2), {"input_ids": ids, "labels": ids}, microbatches=2)
    assert program.captured.loss.meta["val"].dtype == torch.float32
    found = program.verify()
    assert found.ok, str(found)
    assert (found.native.dtype, found.native.limit) == ("bfloat16", 1e-1)


def test_gradients_that_are_all_zero_but_for_rounding_are_no_difference() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=128,
        vocab_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForMaskedLM(config).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("key.bias" in name or "query.bias" in name)
    ids = torch.randint(64, (4, 64))
    pieces = {f"*{kind}.weight": "S(0)" for kind in ("query", "key", "value")}
    program = pc.compile(
        model, pc.Mesh(tensor=2), {"input_ids": ids, "labels": ids}, microbatches=2, sharding=pieces
    )
    found = program.verify()
    assert found.ok, str(found)
    assert "key.bias" in found.worst
    model.get_parameter("bert.encoder.layer.1.attention.self.query.bias").register_hook(torch.neg)
    assert not program.verify().ok


class Opposites(nn.Module):
    """Has a bias whose gradient is a sum of opposite numbers, far above all that weights have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layer(1e-3 * x).chunk(2)
        loss: torch.Tensor = (first - second).sum()
        return loss


def test_a_difference_that_one_rounding_makes_to_the_model_too_is_none() -> None:
    model = Opposites()
    inputs = {"x": torch.randn(4, 4)}
    program = pc.compile(model, pc.Mesh(), inputs)
    weight = model.layer.weight.detach().clone()

    def run(*, nudged: bool) -> Outcome:
        with Original(program, 0, torch.float32, nudged=nudged) as original:
            return accumulated(original, inputs, 1, lambda p: torch.optim.SGD(p, lr=1e-9))

    plain, again, names = run(nudged=False), run(nudged=True), ("layer.weight", "layer.bias")
    assert not plain.gradients["layer.bias"].any()  # the program may add in another order
    moved = dict(plain.gradients, **{"layer.bias": torch.full((4,), torch.finfo().eps)})
    found = dataclasses.replace(plain, gradients=moved)
    assert not compare(plain, found, names).ok
    assert compare(plain, found, names, again=again).ok
    moved = dict(plain.gradients, **{"layer.weight": 1.001 * plain.gradients["layer.weight"]})
    found = dataclasses.replace(plain, gradients=moved)
    assert not compare(plain, found, names, again=again).ok
    assert torch.equal(model.layer.weight, weight)
    assert not any(module._forward_hooks for module in model.modules())


class Cached(nn.Module):
    """Makes a table in a buffer when it first runs, and cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.made = nn.Linear(4, 4), False
        self.lock = threading.Lock()
        self.register_buffer("table", torch.zeros(4))
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.made:
            self.get_buffer("table").copy_(torch.arange(4.0))
            self.register_buffer("mask", torch.ones(4, dtype=torch.bool), persistent=False)
            self.made = True
        loss: torch.Tensor = (self.layer(x) * self.table * self.mask).square().mean()
        return loss


def test_each_data_rank_makes_its_tables_and_the_model_is_left_alone() -> None:
    model = Cached()
    program = compiled(model, pc.Mesh(data=2))
    buffers = dict(model.named_buffers())
    assert not model.made and [*buffers] == ["table"] and not buffers["table"].any()
    found = program.verify()
    assert found.ok, str(found)
    assert not model.made and [name for name, _ in model.named_buffers()] == ["table"]


class InFloat32(torch.autograd.Function):
    """Takes nothing but float32 within."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, torch.eye(4, dtype=torch.float32))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class Custom(nn.Module):
    """A layer with such a Function behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = InFloat32.apply(self.layer(x))  # type: ignore[no-untyped-call]
        return made.square().mean()


def test_functions_that_fail_in_float64_are_named() -> None:
    found = compiled(Custom()).verify()
    assert found.ok, str(found)
    assert found.lifted is None
    assert (
        "no float64 comparison: tests.verification.test_check.InFloat32.apply fails in it"
        in found.note
    )


class Criterion(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, y: torch.Tensor) -> Any:
        return (y * self.weight).square().mean()


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_parameters_of_the_loss_are_trained(precision: str | None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    program = pc.compile(
        model, pc.Mesh(pipeline=2), (X["x"],), Criterion(), microbatches=2, precision=precision
    )
    trained = [item.name for item in program.captured.parameters if item.trainable]
    assert "loss.weight" in trained
    found = program.verify()
    assert found.ok, str(found)
    assert found.gradient_error <= 1e-9


class Slopes(Model):
    """Makes a buffer in its first forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "slopes"):
            self.register_buffer("slopes", torch.arange(4.0), persistent=False)
        return super().forward(x + self.get_buffer("slopes"))


def test_buffers_that_the_first_forward_makes_are_no_difference() -> None:
    model = Slopes()
    found = compiled(model).verify()
    assert found.ok, str(found)
    assert not hasattr(model, "slopes")


class Teacher(nn.Module):
    """A frozen layer follows another by each forward, and a buffer counts them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.mean = nn.Buffer(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.1)
            self.mean.lerp_(x.mean(0), 0.1)
        return (self.student(x) - self.teacher(x - self.mean)).square().mean()


def test_what_forwards_update_on_each_data_rank_is_compared_and_said() -> None:
    found = compiled(Teacher(), pc.Mesh(data=2)).verify()
    assert found.ok, str(found)
    assert "forwards update 'teacher.weight', 'mean': each of the 2 data ranks" in str(found)
    assert compiled(Teacher()).verify().note == ""


class Scaled(nn.Module):
    """A table whose rows are scaled by a buffer in another dtype, as Gemma's are."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.register_buffer("scale", torch.tensor(2.0, dtype=torch.bfloat16), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.table(x) * self.scale.to(self.table.weight.dtype)


class Waving(nn.Module):
    """Computes with a tensor that is a plain attribute before anything else meets it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.phase = nn.Linear(4, 4), torch.rand(4)

    def forward(self, x: torch.Tensor) -> Any:
        return (self.layer(x) * (self.phase * 3).sin()).square().mean()


def test_a_tensor_in_an_attribute_is_in_float64_too() -> None:
    model = Waving()
    found = compiled(model).verify()
    assert found.ok, str(found)
    assert model.phase.dtype == torch.float32


class Repeated(nn.Module):
    """Layers that the model itself runs again in the backward, with what they draw."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = Scaled()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner((x[:, 0].abs() * 3).long().clamp(0, 7)) + x
        for layer in self.layers:
            h = checkpoint(lambda h, f=layer: torch.tanh(F.dropout(f(h))), h, use_reentrant=False)
        loss: torch.Tensor = h.square().mean()
        return loss


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_a_model_runs_again_draws_the_same_and_blocks_keep_their_names(
    recompute: str,
) -> None:
    torch.manual_seed(0)
    program = compiled(Repeated(), pc.Mesh(pipeline=2), recompute=recompute)
    assert program.plan.stages is not None
    assert program.plan.stages[0].blocks[0] == "table"
    found = program.verify()
    assert found.ok, str(found)
    assert found.lifted is not None


class Ordered(nn.Module):
    """A model that takes ordered tokens alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        assert torch.compiler.is_exporting() or not (tokens.diff() < 0).any()
        return self.model(tokens, labels)


def test_a_large_step_is_lifted_on_shorter_rows_unless_anything_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = gpt.GPT(gpt.Config(layers=2, heads=2, hidden=16, vocabulary=64, sequence=64))
    tokens = torch.randint(64, (2, 65))
    inputs = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    program = pc.compile(model, pc.Mesh(pipeline=2), inputs, microbatches=2)
    monkeypatch.setattr("parcompiler.verification.shorter.LARGE", 1e5)
    shapes: list[tuple[int, ...]] = []  # of the batches that ranks get
    run = Pool.run

    def watched(self: Pool, job: Job, size: int) -> Outcome:
        shapes.append(tuple(job.batches[0]["tokens"].shape))
        return run(self, job, size)

    monkeypatch.setattr(Pool, "run", watched)
    found = program.verify()
    assert found.ok and "; at sequence 16 for 64)" in str(found.lifted)
    assert not found.native.sizes and shapes == [(4, 64), (4, 16)]
    shapes.clear()
    assert not program.verify(full=True).decisive.sizes
    assert shapes == [(4, 64), (4, 64)]
    inputs = {name: values.sort().values for name, values in inputs.items()}
    found = pc.compile(Ordered(model), pc.Mesh(pipeline=2), inputs, microbatches=2).verify()
    assert found.ok and found.decisive.sizes
    assert found.native.compiled_inputs and found.decisive.compiled_inputs
    model.get_parameter("layers.0.ffn.up.weight").register_hook(lambda gradient: gradient * 0.5)
    found = program.verify()
    assert not found.ok and not found.decisive.sizes  # the program as it was compiled


class Halved(nn.Module):
    """Scales its layer by a copy of it in 16 bits, to which no gradient goes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.first(x))
        with torch.no_grad():
            scale = x.to(torch.bfloat16).float()
        loss: torch.Tensor = self.last(x * scale).square().mean()
        return loss


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_gradients_that_float64_alone_lets_through_are_no_difference(precision: str) -> None:
    found = compiled(Halved(), pc.Mesh(tensor=2), precision=precision).verify()
    assert found.ok, str(found)
    assert "no float64 comparison: under no_grad 'to" in found.note
    assert compiled(Halved(), pc.Mesh(tensor=2), precision="fp64").verify().ok


class Branching(nn.Module):
    """Layers with dropout, and code of their own for training."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm, self.dropout, self.way = nn.BatchNorm1d(4), nn.Dropout(0.5), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.dropout(self.norm(layer(x)))
        if self.way == "scaled in training" and self.training:
            x = 2 * x
        if self.way == "other constant in training":
            x = x * torch.tensor(2.0 if self.training else 3.0)
        if self.way == "another column in training":
            x = x.clone()
            if self.training:
                x[:, 0] += 1
            x[:, 1] += 1
        if self.way == "noise in training" and self.training:
            x = x + torch.randn_like(x)
        if self.way == "always noise":
            x = x + torch.randn_like(x)
        if self.way == "no loss in evaluation" and not self.training:
            message = "labels are for training"
            raise ValueError(message)
        return x.square().mean()


@pytest.mark.parametrize(
    ("way", "differs"),
    [
        ("operators alone", False),
        ("scaled in training", False),
        ("noise in training", False),
        ("other constant in training", False),
        ("another column in training", True),
        ("always noise", None),
        ("no loss in evaluation", None),
    ],
)
def test_an_evaluation_that_is_not_the_models_is_told(way: str, differs: bool | None) -> None:
    mesh = pc.Mesh(data=2) if way == "operators alone" else pc.Mesh()
    found = compiled(Branching(way), mesh).verify(progress=False)
    assert found.ok, str(found)
    error = found.evaluation_error
    assert (None if error is None else error > 1e-3) is differs
    assert ("evaluations take branches of training" in str(found)) is bool(differs)
