"""ResNet: a convolutional network of residual blocks (He et al. 2015)."""

from parcompiler.models.resnet.configs import PRESETS, Config
from parcompiler.models.resnet.model import ResNet

__all__ = ["PRESETS", "Config", "ResNet"]
