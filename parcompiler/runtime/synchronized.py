"""Batch norm over the micro-batches of all data ranks, as SyncBatchNorm computes in training.

    data 0   micro-batch i  ─┐                      a micro-batch has the same shape everywhere, so
                             ├─ mean, variance      that every rank counts as much as the others
    data 1   micro-batch i  ─┘

Ranks exchange 2 numbers a channel, forward and backward. Gradients of weight and bias are this
rank's part: they are averaged like those of all other parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from parcompiler.pieces import Shard
from parcompiler.runtime.axis import Axis, active


def sync_batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`F.batch_norm`, in training with the statistics of all data ranks.

    input [b, c, ...], the same shape on every rank; running statistics, weight and bias [c].
    """
    group = active("data")
    if group is None or not training:
        normed: torch.Tensor = F.batch_norm(
            input, running_mean, running_var, weight, bias, training, momentum, eps
        )
        return normed
    wide = torch.float32 if input.dtype.itemsize < 4 else input.dtype
    normal, mean, variance = _Normalized.apply(  # type: ignore[no-untyped-call]
        group, input.to(wide), eps
    )
    _update_statistic(running_mean, mean, momentum)
    number = group.size * input.numel() // input.shape[1]
    _update_statistic(running_var, variance * (number / (number - 1)), momentum)
    if weight is not None:
        normal = normal * _spread(weight, input)
    if bias is not None:
        normal = normal + _spread(bias, input)
    result: torch.Tensor = normal.to(input.dtype)
    return result


def _update_statistic(running: torch.Tensor | None, now: torch.Tensor, momentum: float) -> None:
    """Move a running statistic towards that of this micro-batch."""
    if running is not None:
        running.lerp_(now.detach().to(running.dtype), momentum)


def _spread(channels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A value [c] in a shape that broadcasts over a tensor [b, c, ...]."""
    return channels.view(-1, *[1] * (like.dim() - 2))


class _Normalized(torch.autograd.Function):
    """y = (x - mean) / sqrt(variance + eps) over all ranks; dx = (dy - ⟨dy⟩ - y⟨dy·y⟩) / sqrt(...),
    where ⟨⟩ is the mean over a channel's elements on all ranks."""

    @staticmethod
    def forward(
        ctx: Any, group: Axis, x: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        own_variance, own_mean = torch.var_mean(x, dims, correction=0)
        numbers = torch.stack([own_mean, own_variance]).unsqueeze(0)
        means, variances = group.all_gather(numbers, Shard(0, (group.size,))).unbind(1)
        mean = means.mean(0)
        variance = (variances + (means - mean).square()).mean(0)
        scale = (variance + eps).rsqrt()
        y = (x - _spread(mean, x)) * _spread(scale, x)
        ctx.save_for_backward(y, scale)
        ctx.group, ctx.dims = group, dims
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dy, (y, scale) = gradients[0], ctx.saved_tensors
        numbers = torch.stack([dy.mean(ctx.dims), (dy * y).mean(ctx.dims)])
        mean, product = (ctx.group.all_reduce(numbers) / ctx.group.size).unbind()
        dx = (dy - _spread(mean, dy) - y * _spread(product, dy)) * _spread(scale, dy)
        return None, dx, None
