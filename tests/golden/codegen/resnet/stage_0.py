"""Stage 0 of 2 of ResNet: conv+norm, stages.0.

images → stages_0
"""

from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime


class ConvNorm(runtime.Layer):
    """conv+norm, from model.py:79."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Module()
        self.stem.conv = nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False)
        self.stem.norm = nn.BatchNorm2d(8)

    def forward(self, images: Tensor) -> Tensor:
        # stem
        conv = self.stem.conv(images)
        norm = self.stem.norm(conv)
        norm.relu_()
        x = F.max_pool2d(norm, 3, stride=2, padding=1)
        return x


class Sequential(runtime.Layer):
    """stages.0, from model.py:40."""

    names = {
        "_0": ".0",
    }

    def __init__(self) -> None:
        super().__init__()
        self._0 = nn.Module()
        self._0.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self._0.norm1 = nn.BatchNorm2d(8)
        self._0.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self._0.norm2 = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        # 0
        conv1 = self._0.conv1(x)
        norm1 = self._0.norm1(conv1)
        norm1.relu_()
        conv2 = self._0.conv2(norm1)
        y = self._0.norm2(conv2)
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
