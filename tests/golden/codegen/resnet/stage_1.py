"""Stage 1 of 2 of ResNet: stages.1, head.

labels, stages_0 → the loss
"""

from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime


class Sequential_2(runtime.Layer):
    """stages.1, from model.py:40."""

    names = {
        "_0": ".0",
        "_0.shortcut_0": ".0.shortcut.0",
        "_0.shortcut_1": ".0.shortcut.1",
        "_1": ".1",
    }

    def __init__(self) -> None:
        super().__init__()
        self._0 = nn.Module()
        self._0.conv1 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self._0.norm1 = nn.BatchNorm2d(16)
        self._0.conv2 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self._0.norm2 = nn.BatchNorm2d(16)
        self._0.shortcut_0 = nn.Conv2d(8, 16, 1, stride=2, bias=False)
        self._0.shortcut_1 = nn.BatchNorm2d(16)
        self._1 = nn.Module()
        self._1.conv1 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self._1.norm1 = nn.BatchNorm2d(16)
        self._1.conv2 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self._1.norm2 = nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        # 0
        conv1 = self._0.conv1(x)
        norm1 = self._0.norm1(conv1)
        norm1.relu_()
        conv2 = self._0.conv2(norm1)
        y = self._0.norm2(conv2)

        # 0.shortcut
        conv2d = self._0.shortcut_0(x)
        batch_norm = self._0.shortcut_1(conv2d)

        # 0
        x = y + batch_norm
        x.relu_()

        # 1
        conv1 = self._1.conv1(x)
        norm1 = self._1.norm1(conv1)
        norm1.relu_()
        conv2 = self._1.conv2(norm1)
        y = self._1.norm2(conv2)
        x = y + x
        x.relu_()
        return x


class Head(runtime.Layer):
    """head, from model.py:130."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = x.mean((2, 3))
        logits = self.head(logits)
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
