"""Sizes of ResNet: the five of the paper, and a tiny one.

>>> PRESETS["resnet50"].features
2048
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of one ResNet: stage i has `depths[i]` blocks of width `widths[i]`."""

    depths: tuple[int, ...] = (1, 1, 1, 1)
    widths: tuple[int, ...] = (64, 128, 256, 512)
    block: Literal["basic", "bottleneck"] = "basic"
    classes: int = 1000
    image_size: int = 224
    """Height and width of the images that are meant; others work."""
    in_channels: int = 3

    def __post_init__(self) -> None:
        if len(self.depths) != len(self.widths):
            msg = f"depths ({len(self.depths)}) and widths ({len(self.widths)}) must pair up"
            raise ValueError(msg)

    @property
    def expansion(self) -> int:
        """Output channels of a block over its width."""
        return 4 if self.block == "bottleneck" else 1

    @property
    def features(self) -> int:
        """Channels of the last stage's output."""
        return self.widths[-1] * self.expansion


# He et al. 2015, "Deep Residual Learning for Image Recognition" (arXiv:1512.03385), table 1.
PRESETS: dict[str, Config] = {
    "tiny": Config(depths=(1, 2), widths=(8, 16), classes=10, image_size=32),
    "resnet18": Config(depths=(2, 2, 2, 2)),
    "resnet34": Config(depths=(3, 4, 6, 3)),
    "resnet50": Config(depths=(3, 4, 6, 3), block="bottleneck"),
    "resnet101": Config(depths=(3, 4, 23, 3), block="bottleneck"),
    "resnet152": Config(depths=(3, 8, 36, 3), block="bottleneck"),
}
