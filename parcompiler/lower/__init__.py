"""Plan -> Lowered: what every rank does, as stages and instruction lists."""

from parcompiler.lower.lower import lower
from parcompiler.lower.lowered import Call, Lowered, Stage, Tied, Value

__all__ = ["Call", "Lowered", "Stage", "Tied", "Value", "lower"]
