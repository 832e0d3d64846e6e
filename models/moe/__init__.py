"""A mixture of experts: a GPT whose feed-forward layers are chosen token by token."""

from parcompiler.models.moe.configs import PRESETS, Config
from parcompiler.models.moe.model import MoE

__all__ = ["PRESETS", "Config", "MoE"]
