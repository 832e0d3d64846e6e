"""Stage 0 of 2 of Regions: conv, mixers.0.

signal → mixers_0
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime


class Conv(runtime.Block):
    """conv, from models.py:53."""

    names = {
        "stem_conv_weight": "stem.conv.weight",
        "stem_conv_bias": "stem.conv.bias",
        "stem_norm_num_batches_tracked": "stem.norm.num_batches_tracked",
        "stem_norm_weight": "stem.norm.weight",
        "stem_norm_bias": "stem.norm.bias",
        "stem_norm_running_mean": "stem.norm.running_mean",
        "stem_norm_running_var": "stem.norm.running_var",
    }

    def __init__(self) -> None:
        super().__init__()
        self.stem_conv_weight = nn.Parameter(torch.empty(8, 1, 3, dtype=torch.float32))
        self.stem_conv_bias = nn.Parameter(torch.empty(8, dtype=torch.float32))
        self.register_buffer("stem_norm_num_batches_tracked", torch.empty((), dtype=torch.int64))
        self.stem_norm_weight = nn.Parameter(torch.empty(8, dtype=torch.float32))
        self.stem_norm_bias = nn.Parameter(torch.empty(8, dtype=torch.float32))
        self.register_buffer("stem_norm_running_mean", torch.empty(8, dtype=torch.float32))
        self.register_buffer("stem_norm_running_var", torch.empty(8, dtype=torch.float32))

    def forward(self, signal: Tensor) -> Tensor:
        # stem
        conv = F.conv1d(signal, self.stem_conv_weight, self.stem_conv_bias, padding=1)
        self.stem_norm_num_batches_tracked.add_(1)
        norm = F.batch_norm(
            conv,
            self.stem_norm_running_mean,
            self.stem_norm_running_var,
            self.stem_norm_weight,
            self.stem_norm_bias,
            self.training,
            0.1,
            1e-05,
        )
        norm.relu_()
        return norm


class Mixer(runtime.Block):
    """mixers.0, from models.py:67."""

    names = {
        "dense_weight": ".dense.weight",
        "dense_bias": ".dense.bias",
    }

    def __init__(self) -> None:
        super().__init__()
        self.dense_weight = nn.Parameter(torch.empty(8, 8, dtype=torch.float32))
        self.dense_bias = nn.Parameter(torch.empty(8, dtype=torch.float32))

    def forward(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.abs(y)
            scale = scale.amax(dim=1, keepdim=True)
            scale = scale.clamp(1.0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ratio = y / scale
            ratio = ratio.transpose(1, 2)
            mixed = F.linear(ratio, self.dense_weight, self.dense_bias)
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
