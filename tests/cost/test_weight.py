"""The products that a split backward leaves for later: which they are, and their seconds."""

from collections import Counter

import pytest
import torch
from torch import nn

import parcompiler as pc
from parcompiler.capture import capture as captured
from parcompiler.lower import lower
from parcompiler.options import Options
from parcompiler.plan import Plan, Shape, StageChoice
from parcompiler.prices import stage_costs
from parcompiler.problem import Problem
from tests import zoo
from tests.cost.blocks import GptLayer, Loss, ResidualBlock
from tests.cost.capture import cost_of


@pytest.mark.parametrize("shape", [(2, 8, 32), (1, 8, 32)])
def test_they_are_a_part_of_the_backward(shape: tuple[int, ...]) -> None:
    cost = cost_of(GptLayer(32, 4), torch.randn(shape, requires_grad=True))
    assert not Counter(cost.weight) - Counter(cost.backward)
    assert len(cost.weight) == 4
    rows = shape[0] * shape[1]
    assert sum(item.flops for item in cost.weight) == 2 * rows * 12 * 32**2


def test_they_are_half_of_the_products_of_a_layer_that_passes_a_gradient_on() -> None:
    cost = cost_of(nn.Linear(64, 32), torch.randn(8, 64, requires_grad=True))
    flops = sum(item.flops for item in cost.backward if item.kind == "matmul")
    assert 2 * sum(item.flops for item in cost.weight) == flops


def test_a_table_a_convolution_and_a_frozen_matrix_have_none() -> None:
    assert not cost_of(ResidualBlock(4), torch.randn(2, 4, 8, 8)).weight
    ends = cost_of(Loss(50, 16), torch.arange(8).view(2, 4), torch.arange(8).view(2, 4))
    assert [item.flops for item in ends.weight] == [2 * 8 * 50 * 16]  # that of the head
    assert not cost_of(nn.Linear(4, 4).requires_grad_(False), torch.randn(2, 4)).weight


def test_a_product_under_autocast_has_none() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.dense(x)
            loss: torch.Tensor = self.head(y.float()).sum()
            return loss

    problem = Problem(captured(Half(), (torch.randn(3, 8),)), pc.Mesh(), Options(microbatches=1))
    products = [item for cost in problem.priced(1).costs for item in cost.weight]
    assert [item.flops for item in products] == [2 * 3 * 8 * 2]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_stages_have_the_seconds_that_can_wait(schedule: str) -> None:
    """Under every schedule: those that split no backward do not ask for them."""
    options = Options(microbatches=2)
    problem = Problem(captured(*zoo.build("gpt")), pc.Mesh(pipeline=2), options)
    priced = problem.priced(1)
    names = [block.name for block in priced.cut.blocks]
    stages = (StageChoice(tuple(names[:3]), 0), StageChoice(tuple(names[3:]), 1))
    plan = Plan("GPT", "", Shape(2), 2, schedule=schedule, granularity=1, stages=stages)
    first, last = stage_costs(problem, plan, lower(problem.graph, plan, priced.cut))
    assert first.weight == sum(priced.weight[:3])
    assert last.weight == sum(priced.weight[3:])
    assert all(0 <= w < b for w, b in zip(priced.weight, priced.backward, strict=True))
    assert priced.weight[0] == 0  # tables alone
