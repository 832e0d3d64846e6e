"""Values and what is known of nodes at other sizes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import fx

from parcompiler.cost.stand_in import stand_in, tensors
from parcompiler.spmd.runtime_call import Actions, NodeCollectives, is_conversion
from parcompiler.symbolic.reading import Reading, Shape, Unfit
from parcompiler.symbolic.sizes import Sizes


def number_at(item: Reading | Sequence[Reading], shape: Shape | None, sizes: Sizes) -> Any:
    """The number, or the numbers of a list."""
    if isinstance(item, Reading):
        return item.at(shape or (), sizes)
    return [reading.at(shape or (), sizes) for reading in item]


def shapes_of(operand: tuple[fx.Node, fx.Node]) -> tuple[Shape | None, Shape | None]:
    """The shape of a node at capture and of its copy, if they yield a tensor."""
    before, after = (node.meta.get("val") for node in operand)
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None, None
    return tuple(before.shape), tuple(after.shape)


def meta_at(node: fx.Node, operands: Sequence[tuple[fx.Node, fx.Node]]) -> dict[str, Any]:
    """What is known of a node before it has run; ranks exchange more where tensors are larger."""
    meta = dict(node.meta)
    said: NodeCollectives | None = meta.get("exchange")
    if said is None:
        return meta
    grown = next((pair for pair in operands if operator.ne(*shapes_of(pair))), operands[0])
    before, after = shapes_of(grown)
    if before is None or after is None:
        message = "what ranks exchange is no tensor"
        raise Unfit(message)
    factor = Fraction(prod(after), max(1, prod(before)))
    forward, backward = _grown(said.forward, factor), _grown(said.backward, factor)
    meta["exchange"] = NodeCollectives(said.n, forward, backward)
    if is_conversion(node):
        meta["val"] = _converted(meta["val"], before, after)
    return meta


def _grown(said: Actions, factor: Fraction) -> Actions:
    """The same actions on so many times the bytes."""
    return tuple((action, float(factor * Fraction(nbytes))) for action, nbytes in said)


def _converted(value: torch.Tensor, before: Shape, after: Shape) -> Any:
    """The result of a conversion, which makes each dimension so many times as long."""
    ratios = [Fraction(new, max(1, old)) for old, new in zip(before, value.shape, strict=True)]
    shape = [ratio * size for ratio, size in zip(ratios, after, strict=True)]
    if any(size.denominator != 1 for size in shape):
        message = "ranks would hold pieces of different sizes"
        raise Unfit(message)
    return with_shape(value, tuple(map(int, shape)))


def with_shape(value: torch.Tensor, shape: Shape) -> Any:
    """A value without data that has another shape and lies in memory in the same order."""
    before = value.stride()
    order = sorted(range(value.dim()), key=lambda dim: (-before[dim], dim))
    strides, step = [0] * value.dim(), 1
    for dim in reversed(order):
        if before[dim]:
            strides[dim] = step
            step *= max(1, shape[dim])
    return stand_in(torch.empty_strided(shape, strides, dtype=value.dtype, device="meta"))


def alike(before: Any, after: Any) -> bool:
    """Whether two values are as many tensors of the same dtypes and numbers of dimensions."""
    kinds = ([(t.dtype, t.dim()) for t in tensors(value)] for value in (before, after))
    first, second = kinds
    return first == second
