"""The norm of all gradients of the model, from ranks that hold copies and pieces of them.

    rank 0   a: piece   b: whole   t: tied      a rank counts its piece of a tensor, its rows of the
    rank 1   a: piece   b ✗        t ✗          vocabulary without padding, and what all ranks of a
    rank 2   c          t ✗                     line, a data row or a tie hold if it is the first

One number is summed over all ranks, and every rank has the same norm to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from parcompiler.errors import InputError
from parcompiler.runtime.program import RankProgram
from parcompiler.runtime.rows import Rows

EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_


def counts(program: RankProgram, name: str) -> bool:
    """Whether this rank counts what it holds of a tensor."""
    at = program.coordinate
    if at.data:
        return False
    if name in program.rows:
        return True
    ties = [item.ranks for item in program.tied.values() if item.name == name]
    first = all(at.pipeline == min(ranks) for ranks in ties)
    return first and (at.tensor == 0 or name in program.shards)


def norm(
    program: RankProgram,
    gradients: Mapping[str, torch.Tensor],
    device: torch.device,
    total: Callable[[torch.Tensor], None],
) -> torch.Tensor:
    """The 2-norm of the model's gradients, a float64 scalar; `gradients` are this rank's by name.

    `total` adds a tensor up over all ranks, in place. A collective. Each tensor's norm is computed
    in float32 (float64 for float64), their squares are added in float64.
    """
    rows, found = Rows(program), torch.zeros((), dtype=torch.float64, device=device)
    for name, gradient in gradients.items():
        if counts(program, name):
            own = rows.unpadded(name, gradient)
            found += torch.linalg.vector_norm(own, dtype=_wide(own.dtype)).double().square()
    total(found)
    return found.sqrt()


def coefficient(size: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients of this norm are multiplied by, as `torch.nn.utils.clip_grad_norm_` does."""
    return (max_norm / (size + EPSILON)).clamp(max=1.0)


def check_norm(max_norm: object) -> float:
    """The largest norm that a user allows. Raises InputError unless it is a positive number."""
    number = isinstance(max_norm, int | float) and not isinstance(max_norm, bool)
    if not number or math.isnan(float(max_norm)) or float(max_norm) <= 0:  # type: ignore[arg-type]
        message = f"max_norm must be a positive number ({max_norm!r} given)"
        raise InputError(message)
    return float(max_norm)  # type: ignore[arg-type]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add squares in."""
    if dtype.is_complex:
        return torch.complex128 if dtype == torch.complex128 else torch.complex64
    return torch.float64 if dtype == torch.float64 else torch.float32
