"""Operators that read memory rather than values are given the memory that was captured.

`as_strided` says where elements lie in the memory of its operand. A value that was sent, gathered
or computed in another way may lie there in another order: it is put into that of the captured one
first, which costs nothing where it is so already.

>>> graph = fx.Graph()
>>> x = graph.placeholder("x")
>>> x.meta["val"] = torch.empty(4, 6, device="meta").T
>>> chunks = graph.call_function(torch.ops.aten.as_strided.default, (x, [4, 3, 2], [6, 2, 1]))
>>> chunks.meta["val"] = torch.empty(4, 3, 2, device="meta")
>>> keep_memory(graph)
>>> [node.target.__name__ for node in graph.nodes if node.op == "call_function"]
['permute.default', 'contiguous.default', 'permute.default', 'as_strided.default']
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def keep_memory(graph: fx.Graph) -> None:
    """Put what `as_strided` reads into the order in memory that it has in the graph."""
    for node in list(graph.nodes):
        if node.target is aten.as_strided.default and isinstance(node.args[0], fx.Node):
            order = order_of(node.args[0].meta["val"])
            if order is not None and _begins_with(node, node.args[0].meta["val"]):
                node.args = (_ordered(graph, node, node.args[0], order), *node.args[1:3])
                node.kwargs = {}


def order_of(value: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions by falling stride; None where the elements do not fill their memory.

    >>> order_of(torch.empty(2, 3, 4).transpose(0, 1)), order_of(torch.empty(4)[::2])
    ((1, 0, 2), None)
    """
    strides = list(value.stride())
    order = sorted(range(value.dim()), key=lambda dim: (-strides[dim], dim))
    expected = 1
    for dim in reversed(order):
        if value.shape[dim] != 1 and strides[dim] != expected:
            return None
        expected *= value.shape[dim]
    return tuple(order)


def _begins_with(node: fx.Node, value: torch.Tensor) -> bool:
    """Whether an `as_strided` counts from the first element of its operand."""
    offset = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    return offset in (None, value.storage_offset())


def _ordered(graph: fx.Graph, before: fx.Node, value: fx.Node, order: Sequence[int]) -> fx.Node:
    """A value in an order in memory: of the dimensions by falling stride."""
    back = [order.index(dim) for dim in range(len(order))]

    def call(target: Any, *args: Any) -> fx.Node:
        with graph.inserting_before(before):
            made = graph.call_function(target, args)
        made.meta = {**before.meta, "val": target(args[0].meta["val"], *args[1:])}
        return made

    straight = list(order) == sorted(order)
    value = value if straight else call(aten.permute.default, value, list(order))
    value = call(aten.contiguous.default, value)
    return value if straight else call(aten.permute.default, value, back)
