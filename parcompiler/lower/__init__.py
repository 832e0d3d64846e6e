"""Plan -> Lowered: the work of every rank, as stages and instruction lists."""

from parcompiler.lower.lower import lower
from parcompiler.lower.lowered import Call, Lowered, StageProgram, StageValue, TiedTensor

__all__ = ["Call", "Lowered", "StageProgram", "StageValue", "TiedTensor", "lower"]
