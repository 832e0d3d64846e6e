"""Differentiable conversions between placements of a value on the ranks of an axis.

    function          forward          backward                     with partial=True
    fan_out           nothing          all-reduce
    all_reduce        all-reduce       nothing                      all-reduce
    all_gather        all-gather       the own piece                reduce-scatter
    take              the own piece    all-gather                   zeros around the piece
    reduce_scatter    reduce-scatter   all-gather
    all_to_all        all-to-all       all-to-all
    first             zeros elsewhere  nothing
    once              nothing          zeros elsewhere

Where all ranks hold a value whole, each gets its whole gradient, unless `partial`: then each gets a
summand, as each uses the value for a part of the work. (`fan_out` is the `f` of Megatron-LM,
1909.08053, and `all_reduce` its `g`.) The gradient of a parameter that fans out is accumulated over
the micro-batches first, and then, once a step, summed over the ranks. `sizes` is the size of the
whole dimension, or those of its segments; None: all ranks hold equally much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parcompiler.pieces import Shard
from parcompiler.runtime.axis import current
from parcompiler.runtime.compiled import tracing

Sizes = int | tuple[int, ...] | None
LinearMap = Callable[[torch.Tensor], torch.Tensor | None]  # a linear map of tensors


def fan_out(x: torch.Tensor, *, axis: str = "tensor") -> torch.Tensor:
    """A value that every rank uses for its part of the work."""
    trace = tracing.active()
    if trace is not None and (place := trace.place(x)) is not None:
        return trace.extra(lambda tensors: (fan_out(tensors[place], axis=axis),), x)[0]
    group, parameter = current(axis), id(x) if isinstance(x, nn.Parameter) else None
    if parameter is None:
        return linear_map(x, lambda x: x.view_as(x), group.all_reduce)
    return linear_map(x, lambda x: x.view_as(x), lambda dy: group.all_reduce_at_last(parameter, dy))


def all_reduce(x: torch.Tensor, *, partial: bool = False, axis: str = "tensor") -> torch.Tensor:
    """The sum of the ranks' summands."""
    group = current(axis)
    return linear_map(x, group.all_reduce, group.all_reduce if partial else lambda dy: dy)


def all_gather(
    x: torch.Tensor,
    dim: int,
    sizes: Sizes = None,
    *,
    partial: bool = False,
    zigzag: bool = False,
    axis: str = "tensor",
) -> torch.Tensor:
    """The whole tensor, from the ranks' pieces along `dim`."""
    group = current(axis)
    shard = _shard(dim, sizes, x.shape[dim] * group.size, zigzag)

    def backward(dy: torch.Tensor) -> torch.Tensor:
        return group.reduce_scatter(dy, shard) if partial else group.own(dy, shard)

    return linear_map(x, lambda x: group.all_gather(x, shard), backward)


def take(
    x: torch.Tensor,
    dim: int,
    sizes: Sizes = None,
    *,
    partial: bool = False,
    zigzag: bool = False,
    axis: str = "tensor",
) -> torch.Tensor:
    """This rank's piece along `dim` of a value that all ranks hold."""
    group, shard = current(axis), _shard(dim, sizes, x.shape[dim], zigzag)

    def backward(dy: torch.Tensor) -> torch.Tensor:
        return shard.pad(dy, group.size, group.rank) if partial else group.all_gather(dy, shard)

    return linear_map(x, lambda x: group.own(x, shard).contiguous(), backward)


def reduce_scatter(
    x: torch.Tensor, dim: int, sizes: Sizes = None, *, zigzag: bool = False, axis: str = "tensor"
) -> torch.Tensor:
    """This rank's piece along `dim` of the sum of the ranks' summands."""
    group, shard = current(axis), _shard(dim, sizes, x.shape[dim], zigzag)
    return linear_map(
        x, lambda x: group.reduce_scatter(x, shard), lambda dy: group.all_gather(dy, shard)
    )


def all_to_all(
    x: torch.Tensor,
    dim: int,
    to: int,
    sizes: Sizes = None,
    to_sizes: Sizes = None,
    *,
    zigzag: bool = False,
    to_zigzag: bool = False,
    axis: str = "tensor",
) -> torch.Tensor:
    """This rank's piece along the dimension `to`, from the ranks' pieces along `dim`."""
    group = current(axis)
    source = _shard(dim, sizes, x.shape[dim] * group.size, zigzag)
    target = _shard(to, to_sizes, source.whole if to == dim else x.shape[to], to_zigzag)
    return linear_map(
        x,
        lambda x: group.all_to_all(x, source, target),
        lambda dy: group.all_to_all(dy, target, source),
    )


def first(x: torch.Tensor, *, axis: str = "tensor") -> torch.Tensor:
    """Summands of a value that all ranks hold: itself on the first rank, zeros on the others."""
    return linear_map(x, _on_first(axis), lambda dy: dy)


def once(x: torch.Tensor, *, axis: str = "tensor") -> torch.Tensor:
    """A value that all ranks have computed equally; the first gets its gradient, others zeros."""
    return linear_map(x, lambda x: x.view_as(x), _on_first(axis))


def _on_first(axis: str) -> LinearMap:
    """Zeros on all ranks but the first. In a trace they depend on the value: the compiler moves
    operators that do not depend on gradients from the backward to the forward, and removes unused
    ones, collectives too, which all ranks must call in the same order."""
    if current(axis).rank == 0:
        return torch.clone
    if tracing.active() is not None:
        return lambda x: torch.where(torch.zeros_like(x, dtype=torch.bool), x, 0)
    return torch.zeros_like


def _shard(dim: int, sizes: Sizes, size: int, zigzag: bool) -> Shard:
    """How a dimension is split; `size` is that of the whole where `sizes` are not given."""
    if sizes is None:
        sizes = size
    return Shard(dim, (sizes,) if isinstance(sizes, int) else sizes, zigzag)


def linear_map(x: torch.Tensor, forward: LinearMap, backward: LinearMap) -> torch.Tensor:
    """`forward(x)`, whose gradient is mapped by `backward`. Neither may refer to a tensor."""
    y: torch.Tensor = _Conversion.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return y


class _Conversion(torch.autograd.Function):
    """A linear map of a tensor over the ranks, and its transpose."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: LinearMap, backward: LinearMap) -> Any:
        ctx.transpose = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.transpose(gradients[0]), None, None
