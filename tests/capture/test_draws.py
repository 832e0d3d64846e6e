"""A forward draws with torch alone: other numbers would be those of the capture in every step."""

import random

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
    with pytest.raises(CaptureError, match=f"Scaled: its forward draws from {module}, and every"):
        capture(Scaled(module), (torch.zeros(1, 2),))
    capture(Scaled("none"), (torch.zeros(1, 2),))
