"""Llama: a decoder with rotary positions (Touvron et al. 2023, Grattafiori et al. 2024)."""

from parcompiler.models.llama.configs import PRESETS, Config
from parcompiler.models.llama.model import Llama

__all__ = ["PRESETS", "Config", "Llama"]
