"""Causal attention of some rows of a sequence, whose keys and values are at hand up to their last.

    keys       0 ─────────── start ──── start + rows ─────── end
    rows       all of the earlier │ own, causal     │ not read

A mask over all keys would shut out the kernels that skip what no row attends to. On the CPU rows
attend to the earlier keys and to their own in two calls, whose results are merged by the logarithms
of their sums (Rabe and Staats, arXiv 2112.05682; FlashAttention, arXiv 2205.14135, section 3.1):

    s = log(exp s1 + exp s2)        y = y1 exp(s1 - s) + y2 exp(s2 - s)

The kernel of the backward is given y and s of all keys, and so yields each part's gradients. On
accelerators one call does it, with a mask that is no tensor (`causal_lower_right`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from parcompiler.runtime.axis import current

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attention_of_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    axis: str = "tensor",
    **more: Any,
) -> torch.Tensor:
    """Causal attention of this rank's rows of queries [..., rows here, e]; keys and values are
    whole. What no row attends to is left out, unless dropout draws for all of it."""
    group, rows = current(axis), query.shape[-2]
    start = rows * group.rank
    if more.get("dropout_p"):
        size = rows, key.shape[-2]
        mask = torch.ones(size, dtype=torch.bool, device=query.device).tril(start)
        return F.scaled_dot_product_attention(query, key, value, mask, **more)
    return causal(query, key, value, start, **more)


def causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, **more: Any
) -> torch.Tensor:
    """Attention of the rows [..., start : start + rows, e] of a sequence."""
    end = min(start + query.shape[-2], key.shape[-2])
    key, value = key[..., :end, :], value[..., :end, :]
    if start == 0:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **more)
    if query.device.type == "cpu" and _has_kernel(query, key, value):
        if torch.is_autocast_enabled("cpu"):  # which knows of the public function alone
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        merged: torch.Tensor = _Merged.apply(query, key, value, start, more.get("scale"))  # type: ignore[no-untyped-call]
        return merged
    bias: Any = causal_lower_right(query.shape[-2], end)
    made: torch.Tensor = F.scaled_dot_product_attention(query, key, value, bias, **more)
    return made


def _has_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernel takes these: it has no other shapes than [samples, heads, rows, e]."""
    return (
        query.dim() == key.dim() == value.dim() == 4
        and query.shape[0] == key.shape[0] == value.shape[0]
        and query.shape[-1] == value.shape[-1]
        and all(x.stride(-1) == 1 for x in (query, key, value))
    )


class _Merged(torch.autograd.Function):
    """Rows that begin at `start`: with the keys before it, and with those from it."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        start: int,
        scale: float | None,
    ) -> torch.Tensor:
        parts = [
            _FORWARD(query, k, v, 0.0, is_causal, scale=scale)
            for k, v, is_causal in _parts(key, value, start)
        ]
        (before, sum_before), (own, sum_own) = parts
        total = torch.logaddexp(sum_before, sum_own)
        weights = [(x - total).exp_().unsqueeze(-1) for x in (sum_before, sum_own)]
        merged: torch.Tensor = (before * weights[0]).add_(own * weights[1]).to(query.dtype)
        ctx.save_for_backward(query, key, value, merged, total)
        ctx.start, ctx.scale = start, scale
        return merged

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, merged, total = ctx.saved_tensors
        queries, keys, values = zip(
            *(
                _BACKWARD(gradients[0], query, k, v, merged, total, 0.0, is_causal, scale=ctx.scale)
                for k, v, is_causal in _parts(key, value, ctx.start)
            ),
            strict=True,
        )
        return torch.add(*queries), torch.cat(keys, -2), torch.cat(values, -2), None, None


def _parts(
    key: torch.Tensor, value: torch.Tensor, start: int
) -> tuple[tuple[torch.Tensor, torch.Tensor, bool], ...]:
    """Keys and values before `start`, and from it; whether rows read those causally."""
    return (
        (key[..., :start, :], value[..., :start, :], False),
        (key[..., start:, :], value[..., start:, :], True),
    )
