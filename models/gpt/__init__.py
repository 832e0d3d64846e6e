"""GPT: a decoder with learned positions (Radford et al. 2019, Brown et al. 2020)."""

from parcompiler.models.gpt.configs import PRESETS, Config
from parcompiler.models.gpt.model import GPT

__all__ = ["GPT", "PRESETS", "Config"]
