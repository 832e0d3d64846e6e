"""Values that every rank can compute from the batch: indices of lookups and classes of targets.

They need no parameter and no chance. `extract` gives such a computation as a graph of its own,
whose placeholders have the names of those in the model's.
"""

from __future__ import annotations

from torch import fx

from parcompiler.capture.blocks import is_sendable
from parcompiler.capture.effects import Effects, is_random
from parcompiler.capture.prologue import cone
from parcompiler.graph import Graph

PARAMETERS, CHANCE, CONSTANT = "depend on parameters", "depend on chance", "are constants"


def obstacle(graph: Graph, node: fx.Node, effects: Effects) -> str | None:
    """Why not every rank can compute `node` from its batch; None when it can."""
    members = cone(node, effects)
    leaves = {operand for item in members for operand in item.all_input_nodes} - members
    leaves |= {node} - members
    for leaf in leaves:
        known = graph.by_node.get(leaf.name)
        if known is not None and not (known.buffer and not known.mutated):
            return PARAMETERS
    if any(is_random(item) or not is_sendable(item) for item in members):
        return CHANCE
    if not any(leaf.name in graph.input_nodes for leaf in leaves):
        return CONSTANT
    return None


def extract(graph: fx.Graph, node: fx.Node, effects: Effects) -> fx.Graph:
    """The computation of `node` by itself, in the order that updates in place need."""
    members = cone(node, effects)
    needed = {operand for item in members for operand in item.all_input_nodes} | {node}
    copies: dict[fx.Node, fx.Node] = {}
    made = fx.Graph()
    for item in graph.nodes:
        if item.op == "placeholder" and item in needed:
            copies[item] = made.placeholder(item.name)
            copies[item].meta = dict(item.meta)
        elif item in members:
            copies[item] = made.node_copy(item, copies.__getitem__)
        else:
            continue
        copies[item].name = item.name
    # What the source's lines go on with, see naming/source.py.
    copies[node].meta = {**copies[node].meta, "readers": tuple(node.users)}
    made.output(copies[node])
    return made
