"""Operators whose operands are in pieces on the tensor ranks.

embedding, embedding_bag    the rows of its piece of a table: zeros for all others, to be added up
cross_entropy               of the logits of its classes: ranks exchange two numbers a row
cross_entropy_of_rows       its rows, as a part of the mean over those of all ranks
attention_of_heads          its heads, with the keys and values that they share with others
own_experts                 the rows of its experts: zeros for all others, to be added up
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from parcompiler import pieces
from parcompiler.pieces import Shard
from parcompiler.runtime.axis import Axis, current


def embedding(
    indices: torch.Tensor,
    weight: torch.Tensor,
    size: int,
    padding_idx: int = -1,
    *,
    sparse: bool = False,
) -> torch.Tensor:
    """Rows of a table of `size` rows, of which `weight` [rows here, h] are this rank's; `sparse`:
    with row gradients."""
    position, inside, padding = _places(indices, size, padding_idx)
    rows = torch.embedding(weight, position, padding, False, sparse)
    return rows.masked_fill(~inside.unsqueeze(-1), 0)


def embedding_bag(
    indices: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    size: int,
    *,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    sparse: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Sums of rows of a table of `size` rows, of which `weight` [rows here, h] are this rank's."""
    position, inside, _ = _places(indices, size, -1)
    weights = inside.to(weight.dtype)
    if per_sample_weights is not None:
        weights = weights * per_sample_weights
    sums: tuple[torch.Tensor, ...] = torch.embedding_bag(
        weight, position, offsets, False, 0, sparse, weights, include_last_offset, None
    )
    return sums


def _places(
    indices: torch.Tensor, size: int, padding_idx: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Positions of indices in this rank's piece (0 outside), which are inside, and the padding."""
    axis = current()
    span = pieces.piece(size, axis.size, axis.rank)
    _check_within(indices, size)
    position = indices - span.start
    inside = (position >= 0) & (position < span.size)
    padding = padding_idx - span.start
    return position.where(inside, 0), inside, padding if 0 <= padding < span.size else -1


def _check_within(indices: torch.Tensor, size: int) -> None:
    """Fail for an index that is in no rank's piece, as the operator on the whole would."""
    within = ((indices >= 0) & (indices < size)).all()
    torch._assert_async(within, f"an index is not in a table or among classes of {size}")


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    size: int,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`F.cross_entropy` over `size` classes; `logits` [rows, classes here] are this rank's.

    `target` [rows] are the right classes. The result is the same on every rank.
    """
    loss: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        current(), logits, target, size, ignore_index, reduction == "mean", label_smoothing
    )
    return loss


class _CrossEntropy(torch.autograd.Function):
    """The loss of a row is log Σ exp(x - m) - (x_target - m), m the largest logit of the row.

    Smoothing by ε weighs the logit of the target by 1 - ε, and that of every class by ε / size. The
    gradient is softmax(x) minus these shares.
    """

    @staticmethod
    def forward(
        ctx: Any,
        axis: Axis,
        logits: torch.Tensor,
        target: torch.Tensor,
        size: int,
        ignore_index: int,
        mean: bool,
        smoothing: float,
    ) -> torch.Tensor:
        span = pieces.piece(size, axis.size, axis.rank)
        wide = logits.float() if logits.dtype.itemsize < 4 else logits
        shifted = wide - axis.all_reduce_max(wide.amax(1)).unsqueeze(1)
        powers = shifted.exp()
        position = target - span.start
        counts = target != ignore_index
        _check_within(target.where(counts, 0), size)
        inside = (position >= 0) & (position < span.size) & counts
        position = position.where(inside, 0)
        chosen = shifted.gather(1, position.unsqueeze(1)).squeeze(1).where(inside, 0)
        sums = [powers.sum(1), chosen, *([shifted.sum(1)] if smoothing else [])]
        total, chosen, *every = axis.all_reduce(torch.stack(sums)).unbind()
        losses = total.log() - (1 - smoothing) * chosen
        if smoothing:
            losses = losses - smoothing / size * every[0]
        number = counts.sum() if mean else torch.ones_like(counts.sum())
        ctx.save_for_backward(powers.div_(total.unsqueeze(1)), position, inside, counts, number)
        ctx.dtype, ctx.smoothing, ctx.size = logits.dtype, smoothing, size
        return (losses.where(counts, 0).sum() / number).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        shares, position, inside, counts, number = ctx.saved_tensors
        gradient = shares - ctx.smoothing / ctx.size if ctx.smoothing else shares.clone()
        less = inside.to(gradient.dtype).mul(ctx.smoothing - 1).unsqueeze(1)
        gradient.scatter_add_(1, position.unsqueeze(1), less)
        scale = (gradients[0].to(gradient.dtype) / number).where(counts, 0)
        gradient.mul_(scale.unsqueeze(1))
        return None, gradient.to(ctx.dtype), None, None, None, None, None


def cross_entropy_of_rows(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    sizes: tuple[int, ...] = (),
    classes: int | None = None,
    zigzag: bool = False,
    axis: str = "tensor",
) -> torch.Tensor:
    """This rank's part of the mean of a loss; `logits` [rows here, classes], `target` [rows].

    `sizes` are the segments of the rows, each split by itself. With `classes`, tensor ranks have
    pieces of that many classes.
    """
    group, shard = current(axis), Shard(0, sizes or (target.shape[0],), zigzag)
    counts = target != ignore_index
    each = counts if weight is None else weight[target.where(counts, 0)].masked_fill(~counts, 0)
    classes_here = group.own(target, shard)
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if classes is None:
        total = F.cross_entropy(logits, classes_here, weight, reduction="sum", **options)
    else:
        total = cross_entropy(logits, classes_here, classes, reduction="sum", **options)
    return total / each.sum()


def attention_of_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: int,
    *,
    axis: str = "tensor",
    **more: Any,
) -> torch.Tensor:
    """Attention of this rank's share of `heads` heads; keys and values are whole, with fewer
    heads."""
    group = current(axis)
    span = pieces.piece(heads, group.size, group.rank)
    partner = torch.arange(span.start, span.start + span.size, device=key.device)
    partner = partner // (heads // key.shape[-3])
    pair = key.index_select(-3, partner), value.index_select(-3, partner)
    return F.scaled_dot_product_attention(query, *pair, **more)


def own_experts(
    operator: Callable[..., torch.Tensor],
    rows: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    experts: int,
) -> torch.Tensor:
    """`operator(rows, weight, ends)`, rows by experts, where this rank has some of the experts."""
    axis = current()
    span = pieces.piece(experts, axis.size, axis.rank)
    first = int(ends[span.start - 1]) if span.start else 0
    last = int(ends[span.start + span.size - 1])
    product = operator(rows[first:last], weight, ends[span.start : span.start + span.size] - first)
    return F.pad(product, (0, 0, first, rows.shape[0] - last))
