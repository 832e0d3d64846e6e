"""Stage 1 of 2 of ResNet: stages.1, head.

labels, stages_0 → the loss
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime


class Sequential_2(runtime.Block):
    """stages.1, from model.py:40."""

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
        "_0_shortcut_0_weight": ".0.shortcut.0.weight",
        "_0_shortcut_1_num_batches_tracked": ".0.shortcut.1.num_batches_tracked",
        "_0_shortcut_1_weight": ".0.shortcut.1.weight",
        "_0_shortcut_1_bias": ".0.shortcut.1.bias",
        "_0_shortcut_1_running_mean": ".0.shortcut.1.running_mean",
        "_0_shortcut_1_running_var": ".0.shortcut.1.running_var",
        "_1_conv1_weight": ".1.conv1.weight",
        "_1_norm1_num_batches_tracked": ".1.norm1.num_batches_tracked",
        "_1_norm1_weight": ".1.norm1.weight",
        "_1_norm1_bias": ".1.norm1.bias",
        "_1_norm1_running_mean": ".1.norm1.running_mean",
        "_1_norm1_running_var": ".1.norm1.running_var",
        "_1_conv2_weight": ".1.conv2.weight",
        "_1_norm2_num_batches_tracked": ".1.norm2.num_batches_tracked",
        "_1_norm2_weight": ".1.norm2.weight",
        "_1_norm2_bias": ".1.norm2.bias",
        "_1_norm2_running_mean": ".1.norm2.running_mean",
        "_1_norm2_running_var": ".1.norm2.running_var",
    }

    def __init__(self) -> None:
        super().__init__()
        self._0_conv1_weight = nn.Parameter(torch.empty(16, 8, 3, 3, dtype=torch.float32))
        self.register_buffer("_0_norm1_num_batches_tracked", torch.empty((), dtype=torch.int64))
        self._0_norm1_weight = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self._0_norm1_bias = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.register_buffer("_0_norm1_running_mean", torch.empty(16, dtype=torch.float32))
        self.register_buffer("_0_norm1_running_var", torch.empty(16, dtype=torch.float32))
        self._0_conv2_weight = nn.Parameter(torch.empty(16, 16, 3, 3, dtype=torch.float32))
        self.register_buffer("_0_norm2_num_batches_tracked", torch.empty((), dtype=torch.int64))
        self._0_norm2_weight = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self._0_norm2_bias = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.register_buffer("_0_norm2_running_mean", torch.empty(16, dtype=torch.float32))
        self.register_buffer("_0_norm2_running_var", torch.empty(16, dtype=torch.float32))
        self._0_shortcut_0_weight = nn.Parameter(torch.empty(16, 8, 1, 1, dtype=torch.float32))
        self.register_buffer(
            "_0_shortcut_1_num_batches_tracked", torch.empty((), dtype=torch.int64)
        )
        self._0_shortcut_1_weight = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self._0_shortcut_1_bias = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.register_buffer("_0_shortcut_1_running_mean", torch.empty(16, dtype=torch.float32))
        self.register_buffer("_0_shortcut_1_running_var", torch.empty(16, dtype=torch.float32))
        self._1_conv1_weight = nn.Parameter(torch.empty(16, 16, 3, 3, dtype=torch.float32))
        self.register_buffer("_1_norm1_num_batches_tracked", torch.empty((), dtype=torch.int64))
        self._1_norm1_weight = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self._1_norm1_bias = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.register_buffer("_1_norm1_running_mean", torch.empty(16, dtype=torch.float32))
        self.register_buffer("_1_norm1_running_var", torch.empty(16, dtype=torch.float32))
        self._1_conv2_weight = nn.Parameter(torch.empty(16, 16, 3, 3, dtype=torch.float32))
        self.register_buffer("_1_norm2_num_batches_tracked", torch.empty((), dtype=torch.int64))
        self._1_norm2_weight = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self._1_norm2_bias = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.register_buffer("_1_norm2_running_mean", torch.empty(16, dtype=torch.float32))
        self.register_buffer("_1_norm2_running_var", torch.empty(16, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        # 0
        conv1 = F.conv2d(x, self._0_conv1_weight, stride=2, padding=1)
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

        # 0.shortcut
        conv2d = F.conv2d(x, self._0_shortcut_0_weight, stride=2)
        self._0_shortcut_1_num_batches_tracked.add_(1)
        batch_norm = F.batch_norm(
            conv2d,
            self._0_shortcut_1_running_mean,
            self._0_shortcut_1_running_var,
            self._0_shortcut_1_weight,
            self._0_shortcut_1_bias,
            self.training,
            0.1,
            1e-05,
        )

        # 0
        x = y + batch_norm
        x.relu_()

        # 1
        conv1 = F.conv2d(x, self._1_conv1_weight, padding=1)
        self._1_norm1_num_batches_tracked.add_(1)
        norm1 = F.batch_norm(
            conv1,
            self._1_norm1_running_mean,
            self._1_norm1_running_var,
            self._1_norm1_weight,
            self._1_norm1_bias,
            self.training,
            0.1,
            1e-05,
        )
        norm1.relu_()
        conv2 = F.conv2d(norm1, self._1_conv2_weight, padding=1)
        self._1_norm2_num_batches_tracked.add_(1)
        y = F.batch_norm(
            conv2,
            self._1_norm2_running_mean,
            self._1_norm2_running_var,
            self._1_norm2_weight,
            self._1_norm2_bias,
            self.training,
            0.1,
            1e-05,
        )
        x = y + x
        x.relu_()
        return x


class Head(runtime.Block):
    """head, from model.py:130."""

    names = {
        "head_weight": "head.weight",
        "head_bias": "head.bias",
    }

    def __init__(self) -> None:
        super().__init__()
        self.head_weight = nn.Parameter(torch.empty(10, 16, dtype=torch.float32))
        self.head_bias = nn.Parameter(torch.empty(10, dtype=torch.float32))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = x.mean((2, 3))
        logits = F.linear(logits, self.head_weight, self.head_bias)
        loss = F.cross_entropy(logits, labels)
        return loss


class Stage1(runtime.Stage):
    """Stage 1 of 2 of ResNet: stages.1, head."""

    inputs = ("labels",)
    receives = ("stages_0",)
    loss = True
    scopes = {
        "stages_1": "stages.1",
        "head": "",
    }

    def __init__(self) -> None:
        super().__init__()
        self.stages_1 = Sequential_2()
        self.head = Head()

    def forward(self, labels: Tensor, stages_0: Tensor) -> Tensor:
        x = self.stages_1(stages_0)
        loss = self.head(x, labels)
        return loss
