"""What the loss does not depend on has no gradient on any rank: weight decay leaves it alone."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parcompiler as pc
from parcompiler.instruction import Kind
from parcompiler.verification.pool import Job, pool
from tests.distributed.models import WIDTH
from tests.verifier.edits import edited, texts

TOKENS, STEPS, MICROBATCHES = 16, 2, 2
INPUTS = {"tokens": torch.arange(8).view(2, 4), "labels": torch.arange(8, 16).view(2, 4)}
OPTIONS = {"lr": 0.01, "weight_decay": 0.5}


class Partly(nn.Module):
    """Of its parameters the loss depends on some; the others feed a buffer, or are cut off."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.watch = nn.Linear(WIDTH, WIDTH)
        self.teacher = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.ones(WIDTH))
        self.unread = nn.Linear(2, 2)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        early = x = self.layers[0](self.embed(tokens))
        watched = self.watch(x)
        for layer in self.layers[1:]:
            x = layer(x)
        self.mean.mul_(0.9).add_(watched.detach().mean((0, 1)), alpha=0.1)
        with torch.no_grad():
            gate = torch.sigmoid(x * self.gate)
        x = x * gate + self.teacher(early).detach()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Probe(Partly):
    """A head on a backbone that it does not train."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.detach()).flatten(0, 1), labels.flatten())


def batch(seed: int, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randint(TOKENS, (rows, 4), generator=generator) for key in INPUTS}


KINDS = {"partly": Partly, "probe": Probe}


def built(kind: str) -> Partly:
    torch.manual_seed(0)
    return KINDS[kind]()


@cache
def one_process(kind: str, data: int) -> tuple[set[str], dict[str, torch.Tensor]]:
    """The parameters with a gradient, and the state after the steps of a plain loop."""
    model = built(kind)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)  # type: ignore[arg-type]
    count = MICROBATCHES * data
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = {key: tensor.chunk(count) for key, tensor in batch(step, 2 * count).items()}
        for i in range(count):
            (model(**{key: part[i] for key, part in parts.items()}) / count).backward()
        optimizer.step()
    known = {name for name, p in model.named_parameters() if p.grad is not None}
    return known, {name: tensor.detach() for name, tensor in model.state_dict().items()}


PLANS: dict[str, tuple[pc.Mesh, dict[str, Any]]] = {
    "1f1b": (pc.Mesh(pipeline=2), {"schedule": "1f1b", "vocabulary": "whole"}),
    "two parts": (pc.Mesh(pipeline=2), {"schedule": "zb-h1", "recompute": "full"}),
    "two stages a rank": (pc.Mesh(pipeline=2), {"schedule": "interleaved"}),
    "data": (pc.Mesh(data=2, pipeline=2), {"schedule": "1f1b", "vocabulary": "whole"}),
    "tensor": (pc.Mesh(tensor=2), {}),
    "vocabulary": (pc.Mesh(pipeline=2), {"schedule": "1f1b", "vocabulary": "vocab-2"}),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_with_weight_decay_is_that_of_one_process(
    kind: str, plan: str, tmp_path: Path
) -> None:
    mesh, options = PLANS[plan]
    if kind == "probe" and plan == "vocabulary":
        options = {**options, "vocabulary": "whole"}  # nothing before its head is trained
    program = pc.compile(
        built(kind), mesh, INPUTS, microbatches=MICROBATCHES, stages="even", **options
    )
    program.export(tmp_path / "program")
    batches = [batch(step, 2 * MICROBATCHES * mesh.data) for step in range(STEPS)]
    job = Job(str(tmp_path / "program"), batches, optimizer="AdamW", options=OPTIONS)
    found = pool().run(job, program.lowered.grid.size)
    known, state = one_process(kind, mesh.data)
    assert set(found.gradients) == known
    for name, tensor in found.state.items():
        if name != "mean" or mesh.data == 1:  # data ranks keep means of their own rows
            assert torch.allclose(tensor, state[name], rtol=1e-4, atol=1e-6), name


class Watched(Probe):
    """A value that leads to the loss through one stage, and to a buffer alone through another."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first = x = self.layers[1](self.layers[0](self.embed(tokens)))
        for layer in self.layers[2:]:
            x = layer(x)
        with torch.no_grad():
            self.mean.add_(self.layers[3](first).mean((0, 1)))
        return F.cross_entropy(self.head(x + first.detach()).flatten(0, 1), labels.flatten())


def test_no_gradient_comes_back_from_a_stage_whose_use_does_not_lead_to_the_loss() -> None:
    program = pc.compile(
        Watched(), pc.Mesh(pipeline=3), INPUTS, microbatches=2,
        schedule="1f1b", stages="even", vocabulary="whole",
    )  # fmt: skip
    values = program.lowered.values.values()
    (value,) = (value for value in values if len(value.consumers) > 1)
    assert value.differentiable and value.detached == (2,)
    lists = program.lowered.instructions
    sent = [line for line in lists[2] if line.gradient and line.value == value.name]
    assert not sent
    assert any(line.gradient and line.value == value.name for line in lists[1])
    back = f"SEND {value.name}.grad mb 0 to 0"
    (fault,) = texts(edited(program.lowered, 2, lambda lines: lines.insert(-1, back)))
    assert f"what rank 2 makes of {value.name} does not lead to the loss" in fault
    found = program.verify()
    assert found.ok, str(found)


def test_a_stage_in_which_nothing_is_trained_has_no_backward() -> None:
    program = pc.compile(
        built("probe"), pc.Mesh(pipeline=2), INPUTS, schedule="1f1b", stages="even"
    )
    assert not any(line.gradient for lines in program.lowered.instructions for line in lines)
    assert not any(value.differentiable for value in program.lowered.values.values())
    kinds = {line.kind for line in program.lowered.instructions[0]}
    assert kinds == {Kind.FORWARD, Kind.SEND, Kind.SHARE_LOSS}
    added = edited(program.lowered, 0, lambda lines: lines.insert(-1, "BACKWARD stage 0 mb 0"))
    (fault,) = texts(added)
    assert fault.endswith("rank 0 has BACKWARD stage 0 mb 0, which trains nothing")


class Detached(nn.Module):
    """Cuts its input off from the gradient; in training alone it drops something."""

    def __init__(self) -> None:
        super().__init__()
        self.keep = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = torch.tanh(x * x)
        y: torch.Tensor = F.dropout(self.keep(x), 0.3, self.training)
        return y


class CalledTwice(nn.Module):
    """What the first call gives is a parameter's, but leads nowhere: the second cuts it off."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Detached(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.block(self.head(self.block(x)))).square().mean()
        return loss


def test_a_layer_whose_first_call_has_no_history_to_cut_off_cuts_that_of_the_second() -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(3, WIDTH)}
    found = pc.compile(CalledTwice(), pc.Mesh(), inputs, microbatches=2).verify()
    assert found.ok, str(found)


class Chosen(nn.Module):
    """Picks rows: a block without parameters, as its indices are a constant."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_select(1, torch.tensor([0, 2]))


def test_a_rank_without_parameters_is_verified_and_reported() -> None:
    model = nn.Sequential(Chosen(), nn.Dropout(0.5), nn.Linear(WIDTH, 1))
    inputs = (torch.randn(3, 4, WIDTH),)
    program = pc.compile(
        model, pc.Mesh(pipeline=2), inputs, loss=lambda y: y.square().mean(), microbatches=2
    )
    assert min(rank.states for rank in program.report().ranks) == 0
    assert program.verify().ok
