"""Stage 0 of 2 of Regions: conv, mixers.0.

signal → mixers_0
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime


class Conv(runtime.Layer):
    """conv, from models.py:53."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Module()
        self.stem.conv = nn.Conv1d(1, 8, 3, padding=1)
        self.stem.norm = nn.BatchNorm1d(8)

    def forward(self, signal: Tensor) -> Tensor:
        # stem
        conv = self.stem.conv(signal)
        norm = self.stem.norm(conv)
        norm.relu_()
        return norm


class Mixer(runtime.Layer):
    """mixers.0, from models.py:67."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)

    def forward(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.abs(y)
            scale = scale.amax(dim=1, keepdim=True)
            scale = scale.clamp(1.0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ratio = y / scale
            ratio = ratio.transpose(1, 2)
            mixed = self.dense(ratio)
        mixed = mixed.to(torch.float32)
        dropout = F.dropout(mixed, 0.25, self.training)
        dropout = dropout.transpose(1, 2)
        y = y + dropout
        return y


class Stage0(runtime.Stage):
    """Stage 0 of 2 of Regions: conv, mixers.0."""

    inputs = ("signal",)
    gives = ("mixers_0",)
    random = True
    scopes = {
        "conv": "",
        "mixers_0": "mixers.0",
    }

    def __init__(self) -> None:
        super().__init__()
        self.conv = Conv()
        self.mixers_0 = Mixer()

    def forward(self, signal: Tensor) -> Tensor:
        y = self.conv(signal)
        y = self.mixers_0(y)
        return y
