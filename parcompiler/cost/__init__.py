"""Costs of a block: its operators, the bytes it keeps for its backward, seconds on a device."""

from parcompiler.cost.block import BlockCost, trace_block
from parcompiler.cost.memory import (
    OPTIMIZERS,
    WHOLE,
    bytes_per_parameter,
    moved_in_update,
    multiplied_in_update,
)
from parcompiler.cost.operation import Operation
from parcompiler.cost.roofline import hidden_seconds, seconds

__all__ = [
    "OPTIMIZERS",
    "WHOLE",
    "BlockCost",
    "Operation",
    "bytes_per_parameter",
    "hidden_seconds",
    "moved_in_update",
    "multiplied_in_update",
    "seconds",
    "trace_block",
]
