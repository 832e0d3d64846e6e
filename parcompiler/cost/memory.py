"""Bytes of a parameter with its gradient and optimizer states, and bytes moved by its update.

In 16 bits with masters, as in Megatron-LM's table for its distributed optimizer (fp16 or bf16
parameters, fp32 gradients): 2 bytes for the value, 4 for its gradient, 4 for the float32 master,
and the states of the optimizer in float32. (ZeRO, Rajbhandari et al., 2020, section 3.1, has
gradients of 2 bytes, as it does not add them up over micro-batches.)

>>> bytes_per_parameter("adamw", torch.float32)
16
>>> bytes_per_parameter("adamw", torch.float16, masters=True)
18
>>> moved_in_update("adamw", torch.float16, masters=True, fused=True)
42
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from parcompiler.errors import InputError

OPTIMIZERS: Mapping[str, int] = MappingProxyType(
    {"adagrad": 1, "adamw": 2, "muon": 1, "none": 0, "sgd": 0, "sgd-momentum": 1}
)
"""The number of states of each optimizer per parameter, in the dtype of the value it changes."""

ROW_OPTIMIZERS = frozenset({"adagrad", "sgd"})  # leave rows without gradient unchanged
WHOLE = frozenset({"muon"})  # need whole matrices, not rows of them


def multiplied_in_update(optimizer: str, shape: Sequence[int]) -> float:
    """FLOPs of matrix products, in 16 bits, in the optimizer's step for a parameter. Muon does five
    Newton-Schulz steps (torch/optim/_muon.py), each X <- aX + (bA + cA²)X with A = XXᵀ.

    >>> multiplied_in_update("muon", (2, 8)) == 5 * (2 * 2 * 2 * 2 * 8 + 2 * 2**3)
    True
    """
    if optimizer != "muon" or len(shape) != 2:
        return 0.0
    short, long = sorted(shape)
    return 5.0 * (4 * short**2 * long + 2 * short**3)


def bytes_per_parameter(
    optimizer: str, dtype: torch.dtype, *, trainable: bool = True, masters: bool = False
) -> int:
    """The bytes of one element of a parameter: value, gradient, optimizer states.

    With `masters` the optimizer changes a float32 copy of it, and gradient and states are float32.
    A frozen parameter, or a buffer, costs only its value: it has no master. "none" stands for a
    step that leaves the gradients to the caller, but keeps masters. Raises InputError for an
    optimizer that is not in `OPTIMIZERS`.
    """
    if optimizer not in OPTIMIZERS:
        known = ", ".join(sorted(OPTIMIZERS))
        message = f"no memory model for optimizer {optimizer!r} (known: {known})"
        raise InputError(message)
    if not trainable:
        return dtype.itemsize
    if masters:
        return dtype.itemsize + torch.float32.itemsize * (2 + OPTIMIZERS[optimizer])
    return dtype.itemsize * (2 + OPTIMIZERS[optimizer])


# Tensors of a parameter's size that an optimizer of torch reads or writes: in one fused kernel, and
# in the kernels of its plain loop (torch/optim/adamw.py, sgd.py: `_single_tensor_...`).
_MOVED: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "adagrad": (11, 11),  # it has no kernel of its own on GPUs
        "adamw": (7, 20),
        "muon": (12, 12),
        "none": (0, 0),
        "sgd": (3, 3),
        "sgd-momentum": (5, 8),
    }
)


def moved_in_update(
    optimizer: str, dtype: torch.dtype, *, masters: bool = False, fused: bool = False
) -> int:
    """The bytes that the optimizer's step reads and writes for one element of a trained parameter.

    With `masters` the float32 gradient is multiplied by the scale, the optimizer works in float32,
    and the master is written back (see `runtime.mixed_precision`). `fused`: in one kernel.
    """
    values = _MOVED[optimizer][not fused]
    if not masters:
        return dtype.itemsize * values
    wide = torch.float32.itemsize
    between = 2 * wide + wide + dtype.itemsize if values else 0
    return wide * values + between
