"""Stage 1 of 2 of Regions: mixers.1, head.

labels, mixers_0 → the loss
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime


class Mixer(runtime.Layer):
    """mixers.1, from models.py:67."""

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


class Head(runtime.Layer):
    """head, from models.py:87."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, y: Tensor, labels: Tensor) -> Tensor:
        logits = y.mean(-1)
        logits = self.head(logits)
        loss = F.cross_entropy(logits, labels)
        return loss


class Stage1(runtime.Stage):
    """Stage 1 of 2 of Regions: mixers.1, head."""

    inputs = ("labels",)
    receives = ("mixers_0",)
    loss = True
    random = True
    scopes = {
        "mixers_1": "mixers.1",
        "head": "",
    }

    def __init__(self) -> None:
        super().__init__()
        self.mixers_1 = Mixer()
        self.head = Head()

    def forward(self, labels: Tensor, mixers_0: Tensor) -> Tensor:
        y = self.mixers_1(mixers_0)
        loss = self.head(y, labels)
        return loss
