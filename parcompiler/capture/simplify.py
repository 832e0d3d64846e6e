"""A graph without the nodes that do nothing at its precision."""

from __future__ import annotations

import dataclasses

from torch import fx

from parcompiler.capture import clean
from parcompiler.graph import Graph


def simplify(graph: Graph) -> Graph:
    """`graph` without casts to the dtype that a value has already; a new graph.

    The same each time, so that what is found out about it holds for every mesh.
    """
    return graph.once("simplified", lambda: _simplified(graph))


def _simplified(graph: Graph) -> Graph:
    """The new graph."""
    nodes: dict[fx.Node, fx.Node] = {}
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.fx_graph, nodes))
    clean.keep_names(nodes)
    loss = nodes[graph.loss]
    clean.drop_no_operations(copied)
    output = next(node for node in reversed(copied.nodes) if node.op == "output")
    if loss not in output.all_input_nodes:
        (loss,) = output.all_input_nodes
    return dataclasses.replace(graph, fx_graph=copied, loss=loss)
