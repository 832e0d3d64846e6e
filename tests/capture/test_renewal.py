"""Updates in place that would keep pieces of a model together become new tensors where they may."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import parcompiler as pc
from parcompiler.capture.capture import capture
from parcompiler.capture.effects import overload_name

X = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))}
Step = Callable[[torch.Tensor, torch.Tensor], object]


class Branches(nn.Module):
    """Layers whose results are added up in place."""

    def __init__(self, add: Step = torch.Tensor.add_) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.add = add

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.add(total, x)
        loss: torch.Tensor = total.square().mean()
        return loss


class Supervised(nn.Module):
    """A loss behind each layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = x.mean()
        for layer in self.layers:
            x = layer(x)
            loss += x.square().mean()
        return loss


def read_before(total: torch.Tensor, x: torch.Tensor) -> None:
    total += total.view(8, 4).sum() * x


def into_half(total: torch.Tensor, x: torch.Tensor) -> None:
    total[:, :4] += x[:, 4:]


def in_float32(total: torch.Tensor, x: torch.Tensor) -> None:
    total += x.to(torch.float32)


def without_history(total: torch.Tensor, x: torch.Tensor) -> None:
    with torch.no_grad():
        total += x
    total += x


def updates(model: nn.Module) -> list[str]:
    nodes = capture(model, X).fx_graph.nodes
    return [name for node in nodes if (name := overload_name(node)).endswith("_")]


@pytest.mark.parametrize("model", [Branches(), Supervised(), Branches(read_before)])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_what_is_added_up_in_place_may_be_on_several_stages(
    model: nn.Module, precision: str | None
) -> None:
    assert not updates(model)
    mesh = pc.Mesh(pipeline=2)
    program = pc.compile(model, mesh, X, microbatches=2, stages="even", precision=precision)
    assert all(stage.blocks for stage in program.plan.stages or ())
    found = program.verify()
    assert found.ok, str(found)


@pytest.mark.parametrize("add", [into_half, without_history])
def test_what_is_read_otherwise_stays_an_update(add: Step) -> None:
    model = Branches(add)
    assert "add_" in updates(model)
    program = pc.compile(model, pc.Mesh(), X)
    assert len(program.plan.stages or ()) == 1
    assert program.verify().ok


def test_the_sum_keeps_the_dtype_of_its_memory() -> None:
    model = Branches(in_float32)
    program = pc.compile(model, pc.Mesh(pipeline=2), X, microbatches=2, precision="bf16")
    nodes = program.problem.graph.fx_graph.nodes
    sums = [node for node in nodes if overload_name(node) == "type_as"]
    assert len(sums) == 4
    assert all(node.meta["val"].dtype == torch.bfloat16 for node in sums)
    found = program.verify()
    assert found.ok, str(found)


def test_an_update_within_one_layer_stays() -> None:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)) for _ in range(2)]
    model = nn.Sequential(*layers)
    nodes = capture(model, (X["x"],), torch.Tensor.mean).fx_graph.nodes
    assert [overload_name(node) for node in nodes].count("relu_") == 2


class Flow(nn.Module):
    """An accumulator of zeros, beside an input that first meets a buffer."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(x.shape[0])
        x = self.layer(x * self.scale)
        total += x.sum(1)
        return total.mean()


def test_zeros_that_are_no_longer_updated_need_no_gradient() -> None:
    assert "zeros" not in capture(Flow(), X).differentiable
    program = pc.compile(Flow(), pc.Mesh(device="cpu"), X, microbatches=2, progress=False)
    assert program.verify().ok
