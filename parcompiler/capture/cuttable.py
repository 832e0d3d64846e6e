"""Rewrites after which a graph may be cut between any two nodes.

Only tensors cross a cut, never lists, and the batch is the same for every stage. A value that was
sent, gathered or computed in another way may have another memory order than the captured one:
operators that depend on memory layout are given the captured order.

>>> graph = fx.Graph()
>>> x = graph.placeholder("x")
>>> x.meta["val"] = torch.empty(4, 6, device="meta").T
>>> chunks = graph.call_function(torch.ops.aten.as_strided.default, (x, [4, 3, 2], [6, 2, 1]))
>>> chunks.meta["val"] = torch.empty(4, 3, 2, device="meta")
>>> make_cuttable(graph, ["x"])
>>> [node.target.__name__ for node in graph.nodes if node.op == "call_function"]
['permute.default', 'contiguous.default', 'permute.default', 'as_strided.default']
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch import fx

from parcompiler.capture.effects import Effects, base_of, mutated_operands
from parcompiler.capture.rewriting import inserted
from parcompiler.graph import order_of

SMALL = 1 << 10  # elements of a buffer that is copied to other stages

aten = torch.ops.aten


def make_cuttable(graph: fx.Graph, inputs: Collection[str], buffers: Collection[str] = ()) -> None:
    """Rewrite `graph` in place; `inputs` and `buffers` are the placeholders of tensors of the batch
    and of the model's buffers."""
    _keep_memory(graph)
    _keep_items_together(graph)
    _free_inputs(graph, inputs)
    _copy_counters(graph, buffers)


def _keep_items_together(graph: fx.Graph) -> None:
    """Move each `getitem` behind the node that makes the list, so that no block returns a list."""
    last: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            maker: fx.Node = node.args[0]
            place = last.get(maker, maker)
            place.append(node)
            last[maker] = node
            kept = {k: v for k, v in maker.meta.items() if k in ("nn_module_stack", "contexts")}
            node.meta.update(kept)


def _free_inputs(graph: fx.Graph, inputs: Collection[str]) -> None:
    """Redirect updates of a tensor of the batch to a copy."""
    for root in [root for root in Effects(graph).writers if root.name in inputs]:
        first = next(node for node in graph.nodes if root in node.all_input_nodes)
        copy = inserted(first, aten.clone.default, root)
        for user in [user for user in root.users if user is not copy]:
            user.replace_input_with(root, copy)


def _copy_counters(graph: fx.Graph, buffers: Collection[str]) -> None:
    """Redirect readers of a buffer that the forward updates to a copy.

    Autograd saves it until the backward, and forwards of later micro-batches come before that. A
    small one (a step counter) is copied after its last update, for all later readers: they may be
    on other stages.
    """
    effects = Effects(graph)
    updated = {root for root in effects.writers if root.op == "placeholder"}
    copies: dict[tuple[fx.Node, fx.Node], fx.Node] = {}  # by buffer and last writer
    for node in list(graph.nodes):
        if node.op != "call_function" or base_of(node) is not None or any(mutated_operands(node)):
            continue
        for operand in node.all_input_nodes:
            if effects.root(operand) not in updated:
                continue
            writers = [*effects.earlier_writers(operand, node)]
            is_small = operand.meta["val"].numel() <= SMALL
            if not writers or not is_small or effects.root(operand).name not in buffers:
                node.replace_input_with(operand, inserted(node, aten.clone.default, operand))
                continue
            key = operand, writers[-1]
            if key not in copies:
                last = operand if effects.is_before(writers[-1], operand) else writers[-1]
                copies[key] = inserted(last.next, aten.clone.default, operand, like=last)
            node.replace_input_with(operand, copies[key])


def _keep_memory(graph: fx.Graph) -> None:
    """Put the operand of `as_strided` into its captured memory order, if the offset is counted from
    its first element; free where it has that order already."""
    for node in list(graph.nodes):
        if node.target is aten.as_strided.default and isinstance(node.args[0], fx.Node):
            value = node.args[0].meta["val"]
            order = order_of(node.args[0]) or tuple(range(value.dim()))
            offset = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
            fills = value.permute(order).is_contiguous()  # its memory
            if fills and offset in (None, value.storage_offset()):
                node.args = (_ordered(node, node.args[0], order), *node.args[1:3])
                node.kwargs = {}


def _ordered(before: fx.Node, value: fx.Node, order: Sequence[int]) -> fx.Node:
    """A value in a memory order: its dimensions by falling stride."""
    if list(order) == sorted(order):
        return inserted(before, aten.contiguous.default, value)
    back = [order.index(dim) for dim in range(len(order))]
    value = inserted(before, aten.permute.default, value, list(order))
    value = inserted(before, aten.contiguous.default, value)
    return inserted(before, aten.permute.default, value, back)
