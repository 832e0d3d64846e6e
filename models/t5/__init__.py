"""T5: an encoder and a decoder with relative positions (Raffel et al. 2019)."""

from parcompiler.models.t5.configs import PRESETS, Config
from parcompiler.models.t5.model import T5

__all__ = ["PRESETS", "T5", "Config"]
