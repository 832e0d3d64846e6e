"""Stage 0 of 2 of ResNet: conv+norm, stages.0.

images → stages_0
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime


class ConvNorm(runtime.Block):
    """conv+norm, from model.py:79."""

    names = {
        "stem_conv_weight": "stem.conv.weight",
        "stem_norm_num_batches_tracked": "stem.norm.num_batches_tracked",
        "stem_norm_weight": "stem.norm.weight",
        "stem_norm_bias": "stem.norm.bias",
        "stem_norm_running_mean": "stem.norm.running_mean",
        "stem_norm_running_var": "stem.norm.running_var",
    }

    def __init__(self) -> None:
        super().__init__()
        self.stem_conv_weight = nn.Parameter(torch.empty(8, 3, 7, 7, dtype=torch.float32))
        self.register_buffer("stem_norm_num_batches_tracked", torch.empty((), dtype=torch.int64))
        self.stem_norm_weight = nn.Parameter(torch.empty(8, dtype=torch.float32))
        self.stem_norm_bias = nn.Parameter(torch.empty(8, dtype=torch.float32))
        self.register_buffer("stem_norm_running_mean", torch.empty(8, dtype=torch.float32))
        self.register_buffer("stem_norm_running_var", torch.empty(8, dtype=torch.float32))

    def forward(self, images: Tensor) -> Tensor:
        # stem
        conv = F.conv2d(images, self.stem_conv_weight, stride=2, padding=3)
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
        x = F.max_pool2d(norm, 3, stride=2, padding=1)
        return x


class Sequential(runtime.Block):
    """stages.0, from model.py:40."""

    names = {
        "_0_conv1_weight": ".0.conv1.weight",
        "_0_norm1_num_batches_tracked": ".0.norm1.num_batches_tracked",
        "_0_norm1_weight": ".0.norm1.weight",
        "_0_norm1_bias": ".0.norm1.bias",
        "_0_norm1_running_mean": ".0.norm1.running_mean",
        "_0_norm1_running_var": ".0.norm1.running_var",
        "_0_conv2_weight": ".0.conv2.weight",
        "_0_norm2_num_batches_tracked": ".0.norm2.num_batches_tracked",
        "_0_norm2_weight": ".0.norm2.weight",
        "_0_norm2_bias": ".0.norm2.bias",
        "_0_norm2_running_mean": ".0.norm2.running_mean",
        "_0_norm2_running_var": ".0.norm2.running_var",
    }

    def __init__(self) -> None:
        super().__init__()
        self._0_conv1_weight = nn.Parameter(torch.empty(8, 8, 3, 3, dtype=torch.float32))
        self.register_buffer("_0_norm1_num_batches_tracked", torch.empty((), dtype=torch.int64))
        self._0_norm1_weight = nn.Parameter(torch.empty(8, dtype=torch.float32))
        self._0_norm1_bias = nn.Parameter(torch.empty(8, dtype=torch.float32))
        self.register_buffer("_0_norm1_running_mean", torch.empty(8, dtype=torch.float32))
        self.register_buffer("_0_norm1_running_var", torch.empty(8, dtype=torch.float32))
        self._0_conv2_weight = nn.Parameter(torch.empty(8, 8, 3, 3, dtype=torch.float32))
        self.register_buffer("_0_norm2_num_batches_tracked", torch.empty((), dtype=torch.int64))
        self._0_norm2_weight = nn.Parameter(torch.empty(8, dtype=torch.float32))
        self._0_norm2_bias = nn.Parameter(torch.empty(8, dtype=torch.float32))
        self.register_buffer("_0_norm2_running_mean", torch.empty(8, dtype=torch.float32))
        self.register_buffer("_0_norm2_running_var", torch.empty(8, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        # 0
        conv1 = F.conv2d(x, self._0_conv1_weight, padding=1)
        self._0_norm1_num_batches_tracked.add_(1)
        norm1 = F.batch_norm(
            conv1,
            self._0_norm1_running_mean,
            self._0_norm1_running_var,
            self._0_norm1_weight,
            self._0_norm1_bias,
            self.training,
            0.1,
            1e-05,
        )
        norm1.relu_()
        conv2 = F.conv2d(norm1, self._0_conv2_weight, padding=1)
        self._0_norm2_num_batches_tracked.add_(1)
        y = F.batch_norm(
            conv2,
            self._0_norm2_running_mean,
            self._0_norm2_running_var,
            self._0_norm2_weight,
            self._0_norm2_bias,
            self.training,
            0.1,
            1e-05,
        )
        x = y + x
        x.relu_()
        return x


class Stage0(runtime.Stage):
    """Stage 0 of 2 of ResNet: conv+norm, stages.0."""

    inputs = ("images",)
    gives = ("stages_0",)
    scopes = {
        "conv_norm": "",
        "stages_0": "stages.0",
    }

    def __init__(self) -> None:
        super().__init__()
        self.conv_norm = ConvNorm()
        self.stages_0 = Sequential()

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv_norm(images)
        x = self.stages_0(x)
        return x
