"""Reading nodes: their arguments by name, copies and transposes, and tensors of the model.

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
from parcompiler.spmd.call import bound

_VIEWS = ("view", "reshape", "unsqueeze", "squeeze")
_COPIES = frozenset("alias contiguous clone to _to_copy float double".split())


def name_of(node: fx.Node) -> str:
    """The operator of a node without its overload; empty for a placeholder."""
    if node.op != "call_function":
        return ""
    return str(getattr(node.target, "_opname", getattr(node.target, "__name__", node.target)))


def arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of an ATen node by name, with the defaults of those that are not given."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return dict(node.kwargs)
    return bound(node.target, node.args, node.kwargs)


def is_copy(node: fx.Node) -> bool:
    """Whether a node yields the values of its first operand as they are, in the same dtype."""
    if name_of(node) not in _COPIES or not isinstance(node.args[0], fx.Node):
        return False
    return dtype_of(node) == dtype_of(node.args[0])


def source(node: fx.Node) -> fx.Node:
    """Where a value comes from that was only copied."""
    while is_copy(node):
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    return node


def transposed(node: fx.Node) -> fx.Node | None:
    """The matrix that a node is the transpose of; None when it is something else."""
    node = source(node)
    name = name_of(node)
    if not name or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    operand = node.args[0]
    if len(shape_of(operand)) != 2:
        return None
    values = arguments(node)
    is_transpose = name in ("t", "numpy_T", "mT", "matrix_H")
    if name == "transpose":
        is_transpose = values["dim0"] % 2 != values["dim1"] % 2
    elif name == "permute":
        is_transpose = [dim % 2 for dim in values["dims"]] == [1, 0]
    return source(operand) if is_transpose else None


def tensor_of(graph: Graph, node: object) -> Parameter | None:
    """The parameter or buffer that an operand is, perhaps with dimensions of size 1 around it."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        if not is_copy(node) and name_of(node) not in _VIEWS:
            return None
        operand = node.args[0]
        if not isinstance(operand, fx.Node):
            return None
        shapes = [[size for size in shape_of(item) if size != 1] for item in (operand, node)]
        if shapes[0] != shapes[1]:
            return None
        node = operand
    return graph.by_node.get(node.name) if isinstance(node, fx.Node) else None


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a tensor of the model, or a copy, view or transpose of it."""
    for user in node.users:
        calls = user.op == "call_function"
        if calls and (is_copy(user) or transposed(user) is not None or name_of(user) in _VIEWS):
            yield from readers(user)
        else:
            yield user
