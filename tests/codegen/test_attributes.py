"""Attributes of emitted layers: modules of torch.nn where model and operators agree."""

import re
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler.capture.blocks import cut
from parcompiler.codegen.modules import stage_classes
from parcompiler.lower import Lowered
from parcompiler.runtime.stage import Unfilled
from parcompiler.temporary import default_dtype
from tests.codegen.emitting import files_of, graph_of, lowered_by

WIDTH = 4


class Own(nn.Linear):
    """Called as a linear layer, but no plain one."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


class Zoo(nn.Module):
    """One layer of each kind, under names that Python or modules have for something else."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(WIDTH, 6, bias=False)
        self.frozen = nn.Linear(6, WIDTH).requires_grad_(False)
        self.names = nn.RMSNorm(WIDTH, eps=1e-3)
        self.own = Own(WIDTH, WIDTH)
        self.borrowed = nn.Linear(WIDTH, WIDTH)
        self.groups = nn.GroupNorm(2, WIDTH)
        self.conv = nn.Conv1d(WIDTH, 6, 3, padding=1, groups=2)
        self.batch = nn.BatchNorm1d(6, momentum=0.2)
        self.evaluated = nn.BatchNorm1d(6).eval()
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.names(self.frozen(self.plain(x)))
        x = self.own(x) + x @ self.borrowed.weight + self.borrowed.bias
        x = self.weighted(self.groups(x.transpose(1, 2)).transpose(1, 2))
        x = self.mlp(x)
        x = self.evaluated(self.batch(self.conv(x.transpose(1, 2))))
        return x.square().mean()


class Model(nn.Module):
    """A zoo as the one numbered layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Zoo()])

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers[0](x)
        return loss


@cache
def lowered() -> Lowered:
    model = Model().train()
    model.get_submodule("layers.0.evaluated").eval()
    graph = graph_of(model, {"x": torch.randn(2, 3, WIDTH)})
    return lowered_by(graph, [[block.name for block in cut(graph, 1).blocks]])


@pytest.mark.parametrize(
    "line",
    [
        "self.plain = nn.Linear(4, 6, bias=False)",
        "self.frozen = nn.Linear(6, 4).requires_grad_(False)",
        "self.names_2 = nn.RMSNorm(4, eps=0.001)",
        "self.own = nn.Module()",
        "self.own.weight = nn.Parameter(torch.empty(4, 4))",
        "self.borrowed = nn.Module()",
        "self.groups = nn.GroupNorm(2, 4)",
        "self.conv = nn.Conv1d(4, 6, 3, padding=1, groups=2)",
        "self.batch = nn.BatchNorm1d(6, momentum=0.2)",
        'self.evaluated.register_buffer("running_mean", torch.empty(6))',
        "self.weighted.parametrizations = nn.Module()",
        "self.mlp_0 = nn.Linear(4, 8)",
        '"names_2": ".names",',
        '"mlp_2": ".mlp.2",',
        "self.mlp_2(",
    ],
)
def test_each_tensor_stands_where_the_model_has_it(line: str) -> None:
    assert line in files_of(lowered())["stage_0.py"]


def test_no_name_of_the_model_is_lost() -> None:
    model = Model()
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with default_dtype(torch.float32), Unfilled():
            made = stage_classes(lowered(), 0, "cpu")[0]()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    names = made.tensor_names()
    assert sorted(names.values()) == sorted(model.state_dict())
    for path, name in names.items():
        owner, _, leaf = path.rpartition(".")
        tensor = getattr(made.get_submodule(owner), leaf)
        wanted = model.state_dict(keep_vars=True)[name]
        assert (tensor.shape, tensor.dtype) == (wanted.shape, wanted.dtype)
        assert tensor.requires_grad == wanted.requires_grad
    assert not re.search(r"\btorch\.float32\b", files_of(lowered())["stage_0.py"])
