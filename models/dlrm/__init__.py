"""DLRM: tables of categories, numbers, and their products (Naumov et al. 2019)."""

from parcompiler.models.dlrm.configs import PRESETS, Config
from parcompiler.models.dlrm.model import DLRM

__all__ = ["DLRM", "PRESETS", "Config"]
