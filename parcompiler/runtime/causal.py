"""Causal attention of some rows of a sequence, given keys and values up to the last of them.

    keys       0 ─────────── start ──── start + rows ─────── end
    rows       all of the earlier │ own, causal     │ not read

A mask over all keys would rule out the kernels that skip keys to which no row attends. On the CPU
rows attend to the earlier keys and to their own in two calls, whose results are merged (see
`ring`). The backward takes keys in spans of a chunk's rows, at least `SPAN`, so that their
gradients take little memory. On accelerators one call does it, with a mask that is not stored
(`causal_lower_right`). `ring_attention` needs no more than the rank's own keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from parcompiler.pieces import Shard
from parcompiler.ring import BACKWARD, FORWARD, RingAttention, has_kernel, lowered, merge, widened
from parcompiler.runtime.axis import current

SPAN = 256  # keys; shorter spans make the backward slower in total


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
    whole. Keys to which no row attends are skipped, unless dropout must draw for all."""
    group, rows, keys = current(axis), query.shape[-2], key.shape[-2]
    spans = Shard(0, (rows * group.size,), zigzag).spans(group.size, group.rank)
    if more.get("dropout_p"):
        mask = query.new_ones(rows, keys, dtype=torch.bool)
        for part, span in zip(mask.chunk(len(spans)), spans, strict=True):
            part.tril_(span.start)
        return F.scaled_dot_product_attention(query, key, value, mask, **more)
    return causal(query, key, value, [span.start for span in spans], **more)


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    zigzag: bool = False,
    axis: str = "tensor",
) -> torch.Tensor:
    """Attention of this rank's rows of queries [b, heads, rows here, e] to the keys and values of
    all ranks; each rank holds its own rows of them, perhaps with fewer heads."""
    group = current(axis)
    rows = (x if x.stride(-1) == 1 else x.contiguous() for x in lowered(query, key, value))
    settings = (group.rank, group.size), group.rotate, is_causal, zigzag, scale
    made: torch.Tensor = RingAttention.apply(*rows, *settings)  # type: ignore[no-untyped-call]
    return made


def causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: Sequence[int], **more: Any
) -> torch.Tensor:
    """Causal attention of equal chunks of query rows, which begin at rows `starts` of the
    sequence."""
    if query.device.type == "cpu" and has_kernel(query, key, value):
        operands = lowered(query, key, value)
        merged: torch.Tensor = _Merged.apply(*operands, starts, more.get("scale"))  # type: ignore[no-untyped-call]
        return merged
    made = []
    for rows, start in zip(query.chunk(len(starts), -2), starts, strict=True):
        end = start + rows.shape[-2]
        with _disable_current_modes():  # (tracing, FLOP counters) torch cannot make the mask there
            bias = causal_lower_right(rows.shape[-2], end)
        pair = key[..., :end, :], value[..., :end, :]
        made.append(F.scaled_dot_product_attention(rows, *pair, bias, **more))
    return made[0] if len(made) == 1 else torch.cat(made, -2)


class _Merged(torch.autograd.Function):
    """Attention of each chunk of rows to the keys before it and to its own, merged."""

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
                FORWARD(rows, key[..., span, :], value[..., span, :], 0.0, is_causal, scale=scale)
                for span, is_causal in _spans(start, rows.shape[-2])
            ]
            made.append(parts[0] if len(parts) == 1 else widened(parts[0]))
            for part in parts[1:]:
                merge(made[-1], part)
        result, sums = torch.cat([x for x, _ in made], -2).to(query.dtype), [x for _, x in made]
        ctx.save_for_backward(query, key, value, result, *sums)
        ctx.starts, ctx.scale = starts, scale
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, result, *sums = ctx.saved_tensors
        wide = torch.promote_types(query.dtype, torch.float32)  # many spans are added up
        of_queries = torch.zeros_like(query, dtype=wide)
        of_keys, of_values = torch.zeros_like(key), torch.zeros_like(value)
        chunks = [x.chunk(len(sums), -2) for x in (of_queries, gradients[0], query, result)]
        for start, total, total_gradient, gradient, rows, y in zip(
            ctx.starts, sums, *chunks, strict=True
        ):
            for span, is_causal in _spans(start, rows.shape[-2], max(SPAN, rows.shape[-2])):
                pair = key[..., span, :], value[..., span, :]
                more = BACKWARD(gradient, rows, *pair, y, total, 0.0, is_causal, scale=ctx.scale)
                total_gradient += more[0]
                of_keys[..., span, :] += more[1]
                of_values[..., span, :] += more[2]
        return of_queries.to(query.dtype), of_keys, of_values, None, None


def _spans(start: int, size: int, most: int | None = None) -> Iterator[tuple[slice, bool]]:
    """Spans of the keys that `size` rows from `start` read, at `most` that many earlier keys in
    one, and whether a span is causal."""
    step = most or max(1, start)
    for begin in range(0, start, step):
        yield slice(begin, min(begin + step, start)), False
    yield slice(start, start + size), True
