"""What is another in torch while a model is captured."""

import pytest
import torch
from torch import nn

import parcompiler as pc


class Layer(nn.Module):
    """Reads values by `.data`, or limits or replaces its weight by it in each forward."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.other, self.way = nn.Linear(4, 4), nn.Linear(4, 4), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "changed":
            self.linear.weight.data.clamp_(-0.1, 0.1)
        if self.way == "assigned":
            self.linear.weight.data = self.linear.weight.data.clamp(-0.1, 0.1)
        if self.way == "its own":
            self.linear.weight.data = self.linear.weight.data.contiguous()
        if self.way == "memory of another":
            self.linear.weight.data = self.other.weight.data
        if self.way == "another shape":
            self.linear.bias.data = self.linear.bias.data[:1].clone()
        y: torch.Tensor = self.linear(x).tanh()
        if self.way == "read":
            y = y * self.linear.weight.data.norm() - x.data.mean()
        return y


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(way) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("way", ["read", "changed", "assigned", "its own"])
def test_the_data_of_a_tensor_is_what_is_detached_of_it(way: str) -> None:
    torch.manual_seed(0)
    program = pc.compile(
        Model(way), pc.Mesh(pipeline=2), {"x": torch.randn(2, 4)}, microbatches=3,
        precision="fp64", progress=False,
    )  # fmt: skip
    found = program.verify()
    assert found.ok, str(found)
    assert max(found.loss_error, found.gradient_error, found.parameter_error) == 0.0
    assert type(vars(torch.Tensor).get("data")) is not property  # it is as it was


@pytest.mark.parametrize(
    ("way", "kind"),
    [("memory of another", "the memory of a parameter"), ("another shape", "of another kind")],
)
def test_data_that_a_copy_cannot_assign_is_refused(way: str, kind: str) -> None:
    with pytest.raises(pc.CaptureError, match=rf"`\.data` of a tensor.*{kind}.*\n.*'layers\.0'"):
        pc.compile(Model(way), pc.Mesh(), {"x": torch.randn(2, 4)}, progress=False)
