"""The bytes that a parameter costs: its value, its gradient and the states of its optimizer.

>>> bytes_per_parameter("adamw", torch.float32)
16
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from parcompiler.errors import InputError

OPTIMIZERS: Mapping[str, int] = MappingProxyType(
    {"adamw": 2, "none": 0, "sgd": 0, "sgd-momentum": 1}
)
"""The states that each optimizer keeps per parameter, in the dtype of the parameter."""


def bytes_per_parameter(optimizer: str, dtype: torch.dtype, *, trainable: bool = True) -> int:
    """The bytes of one element of a parameter: value, gradient, optimizer states.

    A frozen parameter, or a buffer, costs its value alone. "none" stands for a step that leaves
    the gradients to the caller. Raises InputError for an optimizer that is not in `OPTIMIZERS`.
    """
    if optimizer not in OPTIMIZERS:
        known = ", ".join(sorted(OPTIMIZERS))
        message = f"no memory model for optimizer {optimizer!r} (known: {known})"
        raise InputError(message)
    return dtype.itemsize * (2 + OPTIMIZERS[optimizer] if trainable else 1)
