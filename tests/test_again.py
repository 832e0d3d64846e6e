"""Operators that run again: the same numbers, and nothing kept of what they make."""

import torch
from torch import nn
from torch.nn import functional as F

from parcompiler.again import RunningAgain, again, once


class Kept(RunningAgain):
    """Notes the shapes of what is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(tensor.shape))
        return tensor


class Layer(nn.Module):
    """A norm and a gate, whose results linear layers keep: one of them a view."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.gate, self.up = nn.Linear(8, 16), nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = again(self.norm, x)
        gate, up = self.gate(y), self.up(y.view(1, 5, 8)).view(5, 16)
        product = again(lambda a, b: a * b, again(F.silu, gate), up)
        result: torch.Tensor = x + self.down(product)
        return result


def trained(scope: RunningAgain | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(Layer(), Layer())
    x = torch.randn(5, 8, requires_grad=True)
    if scope is None:
        y = layers(x)
    else:
        with scope:
            y = layers(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y, x.grad, *(p.grad for p in layers.parameters() if p.grad is not None)]


def test_numbers_are_the_same_to_the_bit() -> None:
    plain, lean = trained(None), trained(RunningAgain())
    assert len(plain) == 2 + 2 * 8
    assert all(map(torch.equal, plain, lean))


def test_what_is_made_again_is_not_kept() -> None:
    scope = Kept()
    trained(scope)
    inner = [shape for shape in scope.shapes if shape == (5, 16)]
    assert len(inner) == 2 * 2  # gate and up of each layer; no silu, no product
    assert scope.shapes.count((5, 8)) == 2  # what each layer reads; no norm
    assert not scope.made, "results live on"


def test_an_operator_runs_again_once_for_all_who_ask() -> None:
    calls: list[int] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        return x.exp()

    x = torch.randn(3, requires_grad=True)
    with RunningAgain():
        y = again(counted, x)
        z = y.sin() + y.cos() + y.square()
    assert len(calls) == 1
    z.sum().backward()
    assert len(calls) == 2


def test_without_gradients_or_within_once_nothing_is_noted() -> None:
    x = torch.randn(3, requires_grad=True)
    with RunningAgain() as scope:
        with once():
            first = again(torch.exp, x)
        with torch.no_grad():
            second = again(torch.exp, x)
        assert not scope.made
        assert torch.equal(first, second)
