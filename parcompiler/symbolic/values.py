"""Values without data, and what ranks exchange of them, at other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import fx

from parcompiler.cost.stand_in import stand_in
from parcompiler.spmd.runtime_call import Actions, NodeCollectives, is_conversion
from parcompiler.symbolic.readings import Shape
from parcompiler.symbolic.sizes import Unfit

Pair = tuple[fx.Node, fx.Node]  # a node and its copy


def shapes_of(pair: Pair) -> tuple[Shape | None, Shape | None]:
    """The shape of a node at capture and of its copy, if they yield a tensor."""
    before, after = (node.meta.get("val") for node in pair)
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None, None
    return tuple(before.shape), tuple(after.shape)


def with_exchange(node: fx.Node, operands: Sequence[Pair]) -> dict[str, Any]:
    """The `meta` of a node's copy before it has run: ranks exchange more where tensors are larger.

    Raises Unfit.
    """
    exchange: NodeCollectives | None = node.meta.get("exchange")
    if exchange is None:
        return dict(node.meta)
    shapes = [shapes_of(pair) for pair in operands]
    before, after = next((pair for pair in shapes if pair[0] != pair[1]), shapes[0])
    if before is None or after is None:
        message = "what ranks exchange is no tensor"
        raise Unfit(message)
    factor = Fraction(prod(after), max(1, prod(before)))

    def scaled(actions: Actions) -> Actions:
        return tuple((action, float(factor * Fraction(nbytes))) for action, nbytes in actions)

    forward, backward = scaled(exchange.forward), scaled(exchange.backward)
    meta = {**node.meta, "exchange": NodeCollectives(exchange.n, forward, backward)}
    if is_conversion(node):
        # It yields each dimension as many times as long as that of its operand.
        value = meta["val"]
        columns = zip(before, value.shape, after, strict=True)
        shape = [Fraction(new, max(1, old)) * size for old, new, size in columns]
        if any(size.denominator != 1 for size in shape):
            message = "ranks would hold pieces of different sizes"
            raise Unfit(message)
        meta["val"] = with_shape(value, tuple(map(int, shape)))
    return meta


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
