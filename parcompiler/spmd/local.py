"""What one rank of the axis holds of a tensor: of a value without data, and of a parameter."""

from __future__ import annotations

import dataclasses

import torch

from parcompiler.graph import Parameter
from parcompiler.spmd.exchange import local_size
from parcompiler.spmd.placement import Placement, local_shape, shard_of


def local_parameter(item: Parameter, placement: Placement, n: int) -> Parameter:
    """A tensor of the model of which `n` ranks hold pieces."""
    found = shard_of(placement, item.shape[placement.dim])
    shape = list(item.shape)
    # Segments are split evenly, a dimension without them perhaps not.
    parts = [local_size(size, n) for size in found.sizes]
    shape[placement.dim] = parts[0] if len(parts) == 1 else sum(parts)
    return dataclasses.replace(item, shape=tuple(shape), shard=found)


def local_value(value: torch.Tensor, placement: Placement, n: int) -> torch.Tensor:
    """A tensor without data as rank 0 has it, in the same order in memory."""
    if placement.kind != "S":
        return value
    shape = local_shape(tuple(value.shape), placement, n)
    before = value.stride()
    order = sorted(range(value.dim()), key=lambda dim: -before[dim])
    strides, step = [0] * value.dim(), 1
    for dim in reversed(order):
        if before[dim]:
            strides[dim] = step
            step *= max(1, shape[dim])
    return value.new_empty_strided(shape, strides)
