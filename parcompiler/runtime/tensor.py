"""Conversions between the ways in which a value stands on the tensor ranks; all differentiable.

    function          forward          backward                     with partial=True
    fan_out           nothing          all-reduce
    all_reduce        all-reduce       nothing                      all-reduce
    all_gather        all-gather       the own piece                reduce-scatter
    take              the own piece    all-gather                   zeros around the piece
    reduce_scatter    reduce-scatter   all-gather
    all_to_all        all-to-all       all-to-all
    first             zeros elsewhere  nothing

Where all ranks hold a value whole, each gets the whole gradient of it, unless `partial`: then each
gets a summand, for each goes on to use the value for a part of the work. (`fan_out` is the `f` of
Megatron-LM, 1909.08053, and `all_reduce` its `g`.) The gradient of a parameter that fans out is
added up over the micro-batches first, and then, once a step, over the ranks. `sizes` is the size of
the whole dimension, or those of its segments; where it is missing, all ranks hold as much.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from parcompiler.pieces import Shard
from parcompiler.runtime.axis import Axis, current

Sizes = int | tuple[int, ...] | None


def fan_out(x: torch.Tensor) -> torch.Tensor:
    """What every rank goes on to use for its part of the work."""
    key = id(x) if isinstance(x, nn.Parameter) else None
    made: torch.Tensor = _FanOut.apply(current(), x, key)  # type: ignore[no-untyped-call]
    return made


def all_reduce(x: torch.Tensor, *, partial: bool = False) -> torch.Tensor:
    """The sum of the ranks' summands."""
    made: torch.Tensor = _AllReduce.apply(current(), x, partial)  # type: ignore[no-untyped-call]
    return made


def all_gather(
    x: torch.Tensor, dim: int, sizes: Sizes = None, *, partial: bool = False
) -> torch.Tensor:
    """The whole of the ranks' pieces along `dim`."""
    axis = current()
    shard = _shard(dim, sizes, x.shape[dim] * axis.size)
    made: torch.Tensor = _AllGather.apply(axis, x, shard, partial)  # type: ignore[no-untyped-call]
    return made


def take(x: torch.Tensor, dim: int, sizes: Sizes = None, *, partial: bool = False) -> torch.Tensor:
    """This rank's piece along `dim` of what all ranks hold."""
    shard = _shard(dim, sizes, x.shape[dim])
    made: torch.Tensor = _Take.apply(current(), x, shard, partial)  # type: ignore[no-untyped-call]
    return made


def reduce_scatter(x: torch.Tensor, dim: int, sizes: Sizes = None) -> torch.Tensor:
    """This rank's piece along `dim` of the sum of the ranks' summands."""
    shard = _shard(dim, sizes, x.shape[dim])
    made: torch.Tensor = _ReduceScatter.apply(current(), x, shard)  # type: ignore[no-untyped-call]
    return made


def all_to_all(
    x: torch.Tensor, dim: int, to: int, sizes: Sizes = None, to_sizes: Sizes = None
) -> torch.Tensor:
    """This rank's piece along the dimension `to` of the whole of the ranks' pieces along `dim`."""
    axis = current()
    source = _shard(dim, sizes, x.shape[dim] * axis.size)
    target = _shard(to, to_sizes, source.whole if to == dim else x.shape[to])
    made: torch.Tensor = _AllToAll.apply(axis, x, source, target)  # type: ignore[no-untyped-call]
    return made


def first(x: torch.Tensor) -> torch.Tensor:
    """Summands of what all ranks hold: itself on the first rank, zeros on the others."""
    made: torch.Tensor = _First.apply(current(), x)  # type: ignore[no-untyped-call]
    return made


def _shard(dim: int, sizes: Sizes, size: int) -> Shard:
    """How a dimension is split; `size` is that of the whole where nothing else is said."""
    if sizes is None:
        sizes = size
    return Shard(dim, (sizes,) if isinstance(sizes, int) else sizes)


class _FanOut(torch.autograd.Function):
    """I → R; `key` tells parameters apart."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, x: torch.Tensor, key: int | None) -> torch.Tensor:
        ctx.axis, ctx.key = axis, key
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        axis: Axis = ctx.axis
        (gradient,) = gradients
        if ctx.key is None:
            return None, axis.total(gradient), None
        return None, axis.total_at_last(ctx.key, gradient), None


class _AllReduce(torch.autograd.Function):
    """P → I, or P → R."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, x: torch.Tensor, partial: bool) -> torch.Tensor:
        ctx.axis, ctx.partial = axis, partial
        return axis.total(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        return None, ctx.axis.total(gradient) if ctx.partial else gradient, None


class _AllGather(torch.autograd.Function):
    """S → I, or S → R."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, x: torch.Tensor, shard: Shard, partial: bool) -> torch.Tensor:
        ctx.axis, ctx.shard, ctx.partial = axis, shard, partial
        return axis.whole(x, shard)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        axis: Axis = ctx.axis
        if ctx.partial:
            own = axis.own_total(gradients[0], ctx.shard)
        else:
            own = ctx.shard.take(gradients[0], axis.size, axis.rank)
        return None, own, None, None


class _Take(torch.autograd.Function):
    """I → S, or R → S."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, x: torch.Tensor, shard: Shard, partial: bool) -> torch.Tensor:
        ctx.axis, ctx.shard, ctx.partial = axis, shard, partial
        return shard.take(x, axis.size, axis.rank).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        axis: Axis = ctx.axis
        if ctx.partial:
            whole = ctx.shard.pad(gradients[0], axis.size, axis.rank)
        else:
            whole = axis.whole(gradients[0], ctx.shard)
        return None, whole, None, None


class _ReduceScatter(torch.autograd.Function):
    """P → S."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, x: torch.Tensor, shard: Shard) -> torch.Tensor:
        ctx.axis, ctx.shard = axis, shard
        return axis.own_total(x, shard)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, ctx.axis.whole(gradients[0], ctx.shard), None


class _AllToAll(torch.autograd.Function):
    """S(a) → S(b)."""

    @staticmethod
    def forward(
        ctx: Any, axis: Axis, x: torch.Tensor, source: Shard, target: Shard
    ) -> torch.Tensor:
        ctx.axis, ctx.source, ctx.target = axis, source, target
        return axis.exchanged(x, source, target)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, ctx.axis.exchanged(gradients[0], ctx.target, ctx.source), None, None


class _First(torch.autograd.Function):
    """I → P."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, x: torch.Tensor) -> torch.Tensor:
        return x.clone() if axis.rank == 0 else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, gradients[0]
