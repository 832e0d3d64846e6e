"""Causal attention of some rows of a sequence, whose keys and values are at hand up to their last.

    keys       0 ─────────── start ──── start + rows ─────── end
    rows       all of the earlier │ own, causal     │ not read

A mask over all keys would shut out the kernels that skip what no row attends to. On the CPU rows
attend to the earlier keys and to their own in two calls, whose results are merged by the logarithms
of their sums (Rabe and Staats, arXiv 2112.05682; FlashAttention, arXiv 2205.14135, section 3.1):

    s = log(exp s1 + exp s2)        y = y1 exp(s1 - s) + y2 exp(s2 - s)

The kernel of the backward is given y and s of all keys, and so yields the gradients of any part of
them: it takes as many keys at a time as a chunk has rows, `SPAN` at least, whose gradients take
little memory. On accelerators one call does it, with a mask that is no tensor
(`causal_lower_right`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from parcompiler.pieces import Shard
from parcompiler.runtime.axis import current

SPAN = 256  # keys: fewer in a call of the backward take longer in all
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attention_of_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    zigzag: bool = False,
    axis: str = "tensor",
    **more: Any,
) -> torch.Tensor:
    """Causal attention of this rank's rows of queries [..., rows here, e]; keys and values are
    whole. What no row attends to is left out, unless dropout draws for all of it."""
    group, rows, keys = current(axis), query.shape[-2], key.shape[-2]
    spans = Shard(0, (rows * group.size,), zigzag).spans(group.size, group.rank)
    if more.get("dropout_p"):
        mask = query.new_ones(rows, keys, dtype=torch.bool)
        for part, span in zip(mask.chunk(len(spans)), spans, strict=True):
            part.tril_(span.start)
        return F.scaled_dot_product_attention(query, key, value, mask, **more)
    return causal(query, key, value, [span.start for span in spans], **more)


def causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: Sequence[int], **more: Any
) -> torch.Tensor:
    """Attention of chunks of rows of a sequence, of one size, that start there."""
    if query.device.type == "cpu" and _has_kernel(query, key, value):
        if torch.is_autocast_enabled("cpu"):  # which knows of the public function alone
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        merged: torch.Tensor = _Merged.apply(query, key, value, starts, more.get("scale"))  # type: ignore[no-untyped-call]
        return merged
    made = []
    for rows, start in zip(query.chunk(len(starts), -2), starts, strict=True):
        end = start + rows.shape[-2]
        bias: Any = causal_lower_right(rows.shape[-2], end)
        pair = key[..., :end, :], value[..., :end, :]
        made.append(F.scaled_dot_product_attention(rows, *pair, bias, **more))
    return made[0] if len(made) == 1 else torch.cat(made, -2)


def _has_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernel takes these: it has no other shapes than [samples, heads, rows, e]."""
    return (
        query.dim() == key.dim() == value.dim() == 4
        and query.shape[0] == key.shape[0] == value.shape[0]
        and query.shape[-1] == value.shape[-1]
        and all(x.stride(-1) == 1 for x in (query, key, value))
    )


class _Merged(torch.autograd.Function):
    """Each chunk of rows with the keys before it, and with its own."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: Sequence[int],
        scale: float | None,
    ) -> torch.Tensor:
        made = []
        for rows, start in zip(query.chunk(len(starts), -2), starts, strict=True):
            parts = [
                _FORWARD(rows, key[..., span, :], value[..., span, :], 0.0, is_causal, scale=scale)
                for span, is_causal in _spans(start, rows.shape[-2])
            ]
            made.append(parts[0] if len(parts) == 1 else merge(*parts))
        result, sums = torch.cat([x for x, _ in made], -2), [x for _, x in made]
        ctx.save_for_backward(query, key, value, result, *sums)
        ctx.starts, ctx.scale = starts, scale
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, result, *sums = ctx.saved_tensors
        of_queries, of_keys, of_values = map(torch.zeros_like, (query, key, value))
        chunks = [x.chunk(len(sums), -2) for x in (of_queries, gradients[0], query, result)]
        for start, total, own, gradient, rows, y in zip(ctx.starts, sums, *chunks, strict=True):
            for span, is_causal in _spans(start, rows.shape[-2], max(SPAN, rows.shape[-2])):
                pair = key[..., span, :], value[..., span, :]
                more = _BACKWARD(gradient, rows, *pair, y, total, 0.0, is_causal, scale=ctx.scale)
                own += more[0]
                of_keys[..., span, :] += more[1]
                of_values[..., span, :] += more[2]
        return of_queries, of_keys, of_values, None, None


def merge(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to the keys of two parts, from results [..., e] and logarithms of sums of each."""
    total = torch.logaddexp(one[1], other[1])
    first, second = ((sums - total).exp_().unsqueeze(-1) for sums in (one[1], other[1]))
    return (one[0] * first).add_(other[0] * second).to(one[0].dtype), total


def _spans(start: int, size: int, most: int | None = None) -> Iterator[tuple[slice, bool]]:
    """The keys that rows from `start` read, earlier ones at `most` so many at once, and whether
    they read those causally."""
    step = most or max(1, start)
    for begin in range(0, start, step):
        yield slice(begin, min(begin + step, start)), False
    yield slice(start, start + size), True
