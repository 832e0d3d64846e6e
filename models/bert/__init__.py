"""BERT: an encoder that fills in masked tokens (Devlin et al. 2018)."""

from parcompiler.models.bert.configs import PRESETS, Config
from parcompiler.models.bert.model import BERT

__all__ = ["BERT", "PRESETS", "Config"]
