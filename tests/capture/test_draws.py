"""A forward draws with torch alone: other numbers would be those of the capture in every step."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from parcompiler.capture import capture
from parcompiler.errors import CaptureError


class Scaled(nn.Module):
    def __init__(self, module: str) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.module == "random":
            scale = random.random()
        elif self.module == "numpy.random":
            scale = float(np.random.rand())
        else:
            scale = 1.0
        found: torch.Tensor = self.linear(x).mean() * scale
        return found


@pytest.mark.parametrize("module", ["random", "numpy.random"])
def test_draws_of_other_modules_are_refused(module: str) -> None:
    with pytest.raises(CaptureError, match=f"Scaled: its forward draws from {module}, which"):
        capture(Scaled(module), (torch.zeros(1, 2),))
    capture(Scaled("none"), (torch.zeros(1, 2),))


class Dropping(nn.Module):
    """Layers that are dropped by chance, with a draw that a comparison reads."""

    def __init__(self, draw: Callable[[], Any], keeps: Callable[[Any], bool]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.draw, self.keeps = (draw,), (keeps,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        draw = self.draw[0]()
        x = self.linear(x) if self.keeps[0](draw) else x
        return x.mean()


DRAWS: list[Callable[[], Any]] = [
    lambda: random.random(),
    lambda: random.uniform(0, 1),
    lambda: np.random.random(),
    lambda: np.random.rand(),
    lambda: np.random.uniform(0, 1),
]


@pytest.mark.parametrize("draw", DRAWS)
def test_draws_that_decide_nothing_are_captured(draw: Callable[[], Any]) -> None:
    for keeps in (
        lambda number: not number < 0.0,
        lambda number: number > 0.0,
        lambda number: 0.0 <= number < 1.0,
        lambda number: not number >= 1,
    ):
        before = random.getstate()
        graph = capture(Dropping(draw, keeps), (torch.zeros(1, 2),))
        calls = [node.name for node in graph.fx_graph.nodes if node.op == "call_function"]
        assert calls == ["linear", "mean"]
        assert random.getstate() == before


@pytest.mark.parametrize("draw", DRAWS)
def test_draws_that_decide_are_refused(draw: Callable[[], Any]) -> None:
    for keeps in (
        lambda number: number < 0.1,
        lambda number: number > 0.9,
        lambda number: number == 0.0,
        lambda number: number + 1 > 0,
        lambda number: torch.full((), 1.0) * number is not None,
        lambda number: torch.full((1,), number) is not None,
        lambda number: round(number) > 3,
        bool,
    ):
        with pytest.raises(
            CaptureError, match=r"its forward draws from (random|numpy.random), which"
        ):
            capture(Dropping(draw, keeps), (torch.zeros(1, 2),))


def test_arrays_and_other_distributions_are_refused() -> None:
    draws: list[Callable[[], Any]] = [
        lambda: np.random.rand(1)[0],
        lambda: np.random.uniform(0, 1, size=1)[0],
        lambda: random.gauss(0, 1),
        lambda: random.randint(0, 1),
    ]
    for draw in draws:
        with pytest.raises(CaptureError, match="its forward draws from"):
            capture(Dropping(draw, lambda number: number < 0.0), (torch.zeros(1, 2),))
