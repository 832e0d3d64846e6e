"""The prologue: values that every stage may compute for itself instead of receiving them.

They need no parameter, gradient or random number, and serve several blocks, such as masks of the
batch. Values that do not even depend on the batch (positions, rotary tables) are always in the
prologue, and are computed once. Memory that is written in place moves as a whole: all its writers,
and all readers before the last write, are in the prologue, or none is. So do the results of a node
with several.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from parcompiler.capture.effects import Effects, effects_of, is_random, viewed
from parcompiler.graph import Graph, Parameter


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

    def may_read(node: fx.Node) -> bool:
        known = graph.by_node.get(node.name)
        return known is None or (known.buffer and not known.mutated)

    free = graph.once("free", lambda: _free(nodes, effects, may_read))
    fixed = constants(graph)
    # Views cost nothing: their bases are computed once, and the views stay in place.
    read_constants = {
        viewed(operand)
        for node in nodes
        if node not in fixed
        for operand in node.all_input_nodes
        if operand in fixed
    }

    def serves(node: fx.Node) -> bool:
        users = [user for user in node.users if user in home]
        if node in read_constants:
            return True
        return node not in sent and any(home[user] != home[node] for user in users)

    wanted = [node for node in nodes if node in free and serves(node)]
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


def constants(graph: Graph) -> set[fx.Node]:
    """Nodes whose values never change: they depend on no input, no parameter and no buffer that a
    checkpoint or a forward may change. Includes buffers among their operands.
    """

    def find() -> set[fx.Node]:
        nodes = [node for node in graph.fx_graph.nodes if node.op == "call_function"]
        buffers = {
            node
            for node in graph.fx_graph.nodes
            if node.op == "placeholder" and _is_fixed(graph.by_node.get(node.name))
        }
        return buffers | _free(nodes, effects_of(graph), buffers.__contains__, is_sendable)

    return graph.once("constants", find)


def is_sendable(node: fx.Node) -> bool:
    """Whether a node yields a tensor whose size is known before the step."""
    value = node.meta.get("val")
    if isinstance(value, list | tuple):
        return True  # items are sent one by one
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)


def _is_fixed(item: Parameter | None) -> bool:
    """Whether a placeholder is a buffer that no state dict has and no forward updates."""
    if item is None or not item.buffer or item.mutated:
        return False
    return {item.name, *item.aliases} <= {*item.unsaved}


def _free(
    nodes: list[fx.Node],
    effects: Effects,
    may_read: Callable[[fx.Node], bool],
    may_be: Callable[[fx.Node], bool] = lambda _: True,
) -> set[fx.Node]:
    """The nodes without random draws that follow only from placeholders that `may_read` accepts."""
    blocked: set[fx.Node] = set()
    while True:
        free: set[fx.Node] = set()

        def is_free(node: fx.Node, free: set[fx.Node] = free) -> bool:
            return may_read(node) if node.op == "placeholder" else node in free

        for node in nodes:
            if all(map(is_free, effects.dependencies(node))) and may_be(node):  # rarely false
                if not is_random(node) and effects.root(node) not in blocked:
                    free.add(node)
        # Memory that is written moves with all nodes that depend on the order of writes.
        more = {
            root
            for root, writers in effects.writers.items()
            if root.op == "placeholder"
            or not free.issuperset((*writers, *effects.early_readers({root})))
        }
        if more <= blocked:
            return free
        blocked |= more


def evaluated(
    node: fx.Node,
    members: Sequence[fx.Node],
    values: dict[fx.Node, Any],
    changed: Callable[[Any], Any] = lambda argument: argument,
) -> Any:
    """The value of a node by running the `members` of its cone, in order, on the CPU: from the
    `values` of nodes outside that they read; other arguments go through `changed`. Values are
    dropped after their last use."""
    last = {operand: member for member in members for operand in member.all_input_nodes}

    def argument(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return values[item]
        return torch.device("cpu") if isinstance(item, torch.device) else changed(item)

    with torch.no_grad():
        for member in members:
            args, kwargs = map_aggregate((member.args, member.kwargs), argument)
            assert callable(member.target)
            values[member] = member.target(*args, **kwargs)
            for operand in member.all_input_nodes:
                if last[operand] is member and operand is not node:
                    values.pop(operand, None)
    return values[node]


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
