"""The prologue: values that every stage may compute for itself instead of receiving them.

They need no parameter, gradient or chance, and serve several blocks: masks, position ids, rotary
tables. Memory that is written in place moves as a whole: all who write to it, and all who read it
before the last of them, are in the prologue or none is. So do the results of a node with several.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from parcompiler.capture.effects import Effects, is_random
from parcompiler.graph import Graph


def prologue_of(
    graph: Graph,
    nodes: list[fx.Node],
    home: Mapping[fx.Node, int],
    effects: Effects,
    sent: set[fx.Node],
) -> set[fx.Node]:
    """The nodes of the prologue.

    `nodes` are all that blocks are made of, `home` is the segment of each, `sent` are cheaper to
    send.
    """
    free = graph.once("free", lambda: _free(graph, nodes, effects))
    wanted = [
        node
        for node in nodes
        if node in free
        and node not in sent
        and any(home[user] != home[node] for user in node.users if user in home)
    ]
    chosen: set[fx.Node] = set()
    while True:
        for node in wanted:
            chosen |= cone(node, effects)
        # A list of tensors is never read or sent: its items are.
        items = (user for n in chosen for user in n.users if user.target is operator.getitem)
        more = {*effects.early_readers(chosen), *items}
        wanted = [node for node in nodes if node in more - chosen]
        if not wanted:
            return chosen


def _free(graph: Graph, nodes: list[fx.Node], effects: Effects) -> set[fx.Node]:
    """The nodes that could be in the prologue."""
    mutable = {item.node for item in graph.parameters if item.mutated}
    blocked: set[fx.Node] = set()
    while True:
        free: set[fx.Node] = set()

        def is_free(node: fx.Node, free: set[fx.Node] = free) -> bool:
            if node.op == "placeholder":
                known = graph.by_node.get(node.name)
                return known is None or (known.buffer and node.name not in mutable)
            return node in free

        for node in nodes:
            chance = is_random(node) or effects.root(node) in blocked
            if not chance and all(map(is_free, effects.dependencies(node))):
                free.add(node)
        # Memory that is written moves with all who must see it in order.
        more = {
            root
            for root, writers in effects.writers.items()
            if root.op == "placeholder"
            or not free.issuperset((*writers, *effects.early_readers({root})))
        }
        if more <= blocked:
            return free
        blocked |= more


def cone(node: fx.Node, effects: Effects) -> set[fx.Node]:
    """A node and all that it depends on, with all writers of their memory; no placeholders."""
    members: set[fx.Node] = set()
    pending = [node]
    while pending:
        item = pending.pop()
        if item.op == "call_function" and item not in members:
            members.add(item)
            pending.extend(effects.dependencies(item))
            pending.extend(effects.writers.get(effects.root(item), ()))
    return members
