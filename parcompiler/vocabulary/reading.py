"""Reading nodes: their arguments by name, and the tensor of the model that an operand is.

>>> graph = fx.Graph()
>>> x = graph.placeholder("x")
>>> half = graph.call_function(torch.ops.aten.mul.Tensor, (x, 0.5))
>>> name_of(half), arguments(half)["other"]
('mul', 0.5)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from parcompiler.graph import Graph, Parameter, dtype_of, shape_of

_VIEWS = ("view", "reshape", "unsqueeze", "squeeze")
_SAME = frozenset("alias contiguous clone to _to_copy float double".split())


def name_of(node: fx.Node) -> str:
    """The operator of a node without its overload; empty for a placeholder."""
    if node.op != "call_function":
        return ""
    return str(getattr(node.target, "_opname", getattr(node.target, "__name__", node.target)))


def arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of an ATen node by name, with the defaults of those that are not given."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return dict(node.kwargs)
    found = {item.name: item.default_value for item in target._schema.arguments}
    found |= dict(zip((item.name for item in target._schema.arguments), node.args, strict=False))
    return found | dict(node.kwargs)


def is_same(node: fx.Node) -> bool:
    """Whether a node yields the values of its first operand as they are, in the same dtype."""
    if name_of(node) not in _SAME or not isinstance(node.args[0], fx.Node):
        return False
    return dtype_of(node) == dtype_of(node.args[0])


def source(node: fx.Node) -> fx.Node:
    """Where a value comes from that was only copied."""
    while is_same(node):
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    return node


def turned(node: fx.Node) -> fx.Node | None:
    """The matrix that a node is the transpose of; None when it is something else."""
    node = source(node)
    name = name_of(node)
    if not name or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    operand = node.args[0]
    if len(shape_of(operand)) != 2:
        return None
    if name in ("t", "numpy_T", "mT", "matrix_H"):
        return source(operand)
    given = arguments(node)
    if name == "transpose" and {given["dim0"] % 2, given["dim1"] % 2} == {0, 1}:
        return source(operand)
    if name == "permute" and [dim % 2 for dim in given["dims"]] == [1, 0]:
        return source(operand)
    return None


def held(graph: Graph, node: object) -> Parameter | None:
    """The parameter or buffer that an operand is, perhaps with dimensions of size 1 around it."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        if not is_same(node) and name_of(node) not in _VIEWS:
            return None
        operand = node.args[0]
        if not isinstance(operand, fx.Node) or not _alike(operand, node):
            return None
        node = operand
    return graph.by_node.get(node.name) if isinstance(node, fx.Node) else None


def _alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether two shapes differ in dimensions of size 1 alone."""
    shapes = [[size for size in shape_of(item) if size != 1] for item in (one, other)]
    return shapes[0] == shapes[1]


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a tensor of the model, or a copy, view or transpose of it."""
    for user in node.users:
        if _passes_on(user):
            yield from readers(user)
        else:
            yield user


def _passes_on(node: fx.Node) -> bool:
    """Whether a node only copies, views or transposes."""
    if node.op != "call_function":
        return False
    return is_same(node) or turned(node) is not None or name_of(node) in _VIEWS
