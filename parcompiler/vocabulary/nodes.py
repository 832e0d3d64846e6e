"""Queries about nodes: copies and transposes, tensors of the model, computations from the batch."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from parcompiler.capture.effects import CASTS, effects_of, name_of
from parcompiler.capture.prologue import cone
from parcompiler.capture.rewriting import Rewriting
from parcompiler.graph import Graph, Parameter, dtype_of, shape_of
from parcompiler.spmd.views import RESHAPES, permutation

_COPIES = ("alias", "contiguous", "clone", *CASTS)


def is_copy(node: fx.Node) -> bool:
    """Whether a node returns the values of its first operand unchanged, in the same dtype."""
    if name_of(node) not in _COPIES or not isinstance(node.args[0], fx.Node):
        return False
    return dtype_of(node) == dtype_of(node.args[0])


def source(node: fx.Node) -> fx.Node:
    """The value from which a node is copied, through any number of copies."""
    while is_copy(node):
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    return node


def transposed(node: fx.Node) -> fx.Node | None:
    """The matrix whose transpose a node is; None if it is something else."""
    node = source(node)
    if permutation(node) != [1, 0] or dtype_of(node).is_complex:  # some are of the conjugate
        return None
    return source(node.all_input_nodes[0])


def tensor_of(graph: Graph, node: object) -> Parameter | None:
    """The parameter or buffer that an operand is, perhaps with dimensions of size 1 around it."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        if not is_copy(node) and name_of(node) not in RESHAPES:
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
    """The nodes that read a tensor of the model, or a copy, view or transpose of it."""
    for user in node.users:
        calls = user.op == "call_function"
        if calls and (is_copy(user) or transposed(user) is not None or name_of(user) in RESHAPES):
            yield from readers(user)
        else:
            yield user


def extract(graph: Graph, node: fx.Node) -> fx.Graph:
    """The computation of `node` from the batch as a graph, in an order that respects in-place
    updates.

    Placeholders have the names of those in the model's graph.
    """
    members = cone(node, effects_of(graph))
    needed = {operand for item in members for operand in item.all_input_nodes} | {node}
    small = Rewriting(graph)
    for item in graph.fx_graph.nodes:
        if item in members or (item.op == "placeholder" and item in needed):
            small.copy(item)
    # In the source, the line of this value continues with its readers, see naming/source.py.
    small.nodes[node].meta["readers"] = tuple(node.users)
    small.made.output(small.nodes[node])
    return small.made
