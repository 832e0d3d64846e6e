"""FLOPs of the operators that torch.utils.flop_counter has no formula for, or a wrong one.

A multiplication with its addition counts 2, as there. Attention counts every score, also those that
a causal mask discards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_flop_count

Formula = Callable[..., float]


def formula(name: str, packet: object) -> Formula | None:
    """The function from arguments (and out_val=result) to FLOPs, or None where none is known.

    `name` is that of the operator without its overload, as in "aten::mm", `packet` the operator.
    """
    return FORMULAS.get(name) or flop_registry.get(packet)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> float:
    return float(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(
    _gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> float:
    """Five products of the forward's two sizes: the scores once more, and four gradients."""
    rows = query.numel() // query.shape[-1] * key.shape[-2]
    return 2.0 * rows * (3 * query.shape[-1] + 2 * value.shape[-1])


def _convolution_backward(
    gradient: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> float:
    """The forward's FLOPs for each gradient that is asked for; torch's formula ignores groups."""
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, mask = rest
    shapes = list(image.shape), list(weight.shape), list(gradient.shape)
    return float(conv_flop_count(*shapes, transposed=transposed) * sum(mask[:2]))


def _matrix_vector(matrix: torch.Tensor, *_: Any) -> float:
    return 2.0 * matrix.numel()


def _grouped(rows: torch.Tensor, weights: torch.Tensor, *_: Any) -> float:
    """Each row meets the matrix of its group, in whichever operand the groups are stacked."""
    stacked = rows.dim() == 3 and weights.dim() == 2
    return 2.0 * prod(rows.shape[int(stacked) :]) * weights.shape[-1]


_FROM_TENSORS: Mapping[str, Formula] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::_scaled_dot_product_accelerator_overrideable": _attention,
    "aten::_scaled_dot_product_accelerator_overrideable_backward": _attention_backward,
    "aten::scaled_dot_product_attention": _attention,
    "aten::convolution_backward": _convolution_backward,
    "aten::dot": _matrix_vector,
    "aten::vdot": _matrix_vector,
    "aten::mv": _matrix_vector,
    "aten::addmv": lambda _, matrix, *__: _matrix_vector(matrix),
    "aten::_grouped_mm": _grouped,
    "transformers::grouped_mm_fallback": _grouped,
    "transformers::grouped_mm_fallback_backward": lambda *args: 2 * _grouped(*args),
}

# FLOPs follow from the positional arguments; out_val and options are left out.
FORMULAS: Mapping[str, Formula] = {
    name: lambda *args, compute=compute, **_: compute(*args)
    for name, compute in _FROM_TENSORS.items()
}
