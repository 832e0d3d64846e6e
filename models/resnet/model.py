"""ResNet: a stem, stages of residual blocks, a mean over the image, and a classifier.

He et al. 2015, "Deep Residual Learning for Image Recognition" (arXiv:1512.03385). A bottleneck
halves the image in its 3x3 convolution, not in its first 1x1, as is usual since ("version 1.5").
"""

from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler.models.resnet.configs import Config


def conv(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the image's size, divided by the stride."""
    return nn.Conv2d(
        in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False
    )


def shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """What is added to a block's output: its input, projected where the shape changes."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions: [batch, in_channels, h, w] to [batch, width, h/stride, w/stride]."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, width, 3, stride)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = shortcut(in_channels, width, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        x = self.relu(y + self.shortcut(x))
        return x


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1: [batch, in_channels, h, w] to [batch, 4 * width, h/stride, w/stride]."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, width, 1)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3, stride)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = conv(width, 4 * width, 1)
        self.norm3 = nn.BatchNorm2d(4 * width)
        self.shortcut = shortcut(in_channels, 4 * width, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        x = self.relu(y + self.shortcut(x))
        return x


class Stem(nn.Module):
    """A quarter of the image's height and width: [batch, channels, h, w] to [batch, width, ...]."""

    def __init__(self, in_channels: int, width: int) -> None:
        super().__init__()
        self.conv = conv(in_channels, width, 7, stride=2)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.pool(self.relu(self.norm(self.conv(images))))
        return x


def make_stages(config: Config) -> nn.ModuleList:
    """One Sequential of blocks per stage; each stage but the first halves the image."""
    block = Bottleneck if config.block == "bottleneck" else BasicBlock
    stages = nn.ModuleList()
    channels = config.widths[0]
    for i, (depth, width) in enumerate(zip(config.depths, config.widths, strict=True)):
        stage = nn.Sequential()
        for j in range(depth):
            stage.append(block(channels, width, stride=2 if i > 0 and j == 0 else 1))
            channels = width * config.expansion
        stages.append(stage)
    return stages


class ResNet(nn.Module):
    """A classifier of images."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.stem = Stem(config.in_channels, config.widths[0])
        self.stages = make_stages(config)
        self.head = nn.Linear(config.features, config.classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters; call it again after `to_empty`.

        Convolutions as in He et al. 2015, "Delving Deep into Rectifiers" (arXiv:1502.01852), the
        head with a standard deviation of 0.01 as in Goyal et al. 2017 (arXiv:1706.02677).
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """The mean cross-entropy, or without labels the logits [batch, classes].

        `images` is [batch, in_channels, height, width], `labels` integers [batch].
        """
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        if labels is None:
            return logits
        return F.cross_entropy(logits, labels)
