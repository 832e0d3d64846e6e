"""How long the variables of an emitted forward keep their values: until their names are given away.

    y = F.rms_norm(x, ...)
    q = runtime.linear(y, ...)      reads y the last time
    y = F.scaled_dot_product(...)   the first y is gone once this has run

>>> import torch
>>> graph = fx.Graph()
>>> x = graph.placeholder("x")
>>> nodes = [x]
>>> for _ in range(3):
...     nodes.append(graph.call_function(torch.ops.aten.relu.default, (nodes[-1],)))
>>> overwritten(nodes[1:], {x: "x"}, nodes[-1:])
{relu_default_1: [relu_default], relu_default_2: [relu_default_1]}
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import fx

from parcompiler.naming.variables import Variables


def overwritten(
    nodes: Sequence[fx.Node], arguments: Mapping[fx.Node, str], outputs: Sequence[fx.Node]
) -> dict[fx.Node, list[fx.Node]]:
    """By node of a block, those whose variables its line takes: nothing has their values then.

    `arguments` are the names of its inputs, `outputs` is what it returns. Every node is taken to
    have a line.
    """
    read = {operand for node in nodes for operand in node.all_input_nodes}.difference(nodes)
    operands = {node: f"self.{node.name}" for node in read}
    operands |= arguments
    variables = Variables(nodes, dict.fromkeys(outputs), operands)
    held: dict[str, list[fx.Node]] = defaultdict(list)
    gone: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    placed = set[fx.Node]()
    for node in variables.written:
        names = variables.assign(node)
        if names is None:
            whole = node.all_input_nodes[0]
            if node is max(whole.users, key=variables.position.__getitem__):
                gone[node].append(whole)
            continue
        for name in names:
            gone[node] += held.pop(name, ())
        for item in {node: None, **node.users}:  # a tuple has no name, but its parts
            if item in variables.names and item not in placed:
                held[variables.names[item]].append(item)
                placed.add(item)
    return {node: items for node, items in gone.items() if items}
