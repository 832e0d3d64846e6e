"""Regions without gradients that torch.export loses are there in programs nevertheless."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn

import parcompiler as pc

X = (torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),)


class Layer(nn.Module):
    """A second branch that trains nothing."""

    def __init__(self, mode: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self.first, self.second, self.mode = nn.Linear(8, 8), nn.Linear(8, 8), mode

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with self.mode():
            y = self.second(x)
            with torch.enable_grad():
                z = self.first(x)
        return torch.tanh(x + y + z)


class Model(nn.Module):
    def __init__(self, mode: Callable[[], AbstractContextManager[object]], *, cast: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.cast = nn.ModuleList(Layer(mode) for _ in range(4)), cast

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.cast):
            for layer in self.layers:
                x = layer(x)
        return x.float().square().mean()


@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_records_no_gradients_trains_nothing(
    mode: Callable[[], AbstractContextManager[object]], *, cast: bool
) -> None:
    model = Model(mode, cast=cast)
    program = pc.compile(model, pc.Mesh(pipeline=2, device="cpu"), X, microbatches=1)
    assert program.verify(progress=False).ok
    trained = {"first.weight", "first.bias"}
    carrying = {x.name for x in program.problem.graph.parameters if x.node in
                program.problem.graph.differentiable}  # fmt: skip
    assert {name.partition(".")[2].partition(".")[2] for name in carrying} == trained
