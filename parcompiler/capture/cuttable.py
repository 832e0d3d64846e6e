"""Rewrites after which a graph may be cut between any two nodes.

What crosses a cut is a tensor, never a list, and the batch is the same for every stage.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import fx

from parcompiler.capture.effects import Effects, base_of


def make_cuttable(graph: fx.Graph, inputs: Collection[str]) -> None:
    """Rewrite `graph` in place; `inputs` are the placeholders of tensors of the batch."""
    _keep_items_together(graph)
    _free_inputs(graph, inputs)
    _copy_counters(graph)


def _keep_items_together(graph: fx.Graph) -> None:
    """Put each `getitem` behind what makes the list, so that no block returns a list."""
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
    """Let the model write to a copy where it would update a tensor of the batch in place."""
    for root in [root for root in Effects(graph).writers if root.name in inputs]:
        first = next(node for node in graph.nodes if root in node.all_input_nodes)
        with graph.inserting_before(first):
            own = graph.call_function(torch.ops.aten.clone.default, (root,))
        own.meta = {**first.meta, "val": root.meta["val"].clone()}
        for user in [user for user in root.users if user is not own]:
            user.replace_input_with(root, own)


def _copy_counters(graph: fx.Graph) -> None:
    """Let readers of a buffer that the forward updates read a copy of it.

    Autograd keeps what they read until the backward, and forwards of later micro-batches come
    before that.
    """
    effects = Effects(graph)
    updated = {root for root in effects.writers if root.op == "placeholder"}
    for node in list(graph.nodes):
        if node.op != "call_function" or base_of(node) is not None or effects.mutates(node):
            continue
        for operand in node.all_input_nodes:
            if effects.root(operand) in updated:
                with graph.inserting_before(node):
                    own = graph.call_function(torch.ops.aten.clone.default, (operand,))
                own.meta = {**node.meta, "val": operand.meta["val"].clone()}
                node.replace_input_with(operand, own)
