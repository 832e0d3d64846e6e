"""New tensors in place of updates that would keep pieces of a model together.

    for layer in layers:
        x = layer(x)
        total += x             total = total + x        the same value: nobody reads the old one

Stages share no memory, so what is updated in place stays on the stage that has made it. Where
nothing reads the memory afterwards but through the result of the update, a new tensor is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from parcompiler.capture.blocks import binding
from parcompiler.capture.effects import Effects, effects_of, is_random, mutated_operands
from parcompiler.capture.gradients import is_unrecorded
from parcompiler.capture.rewriting import Rewriting
from parcompiler.graph import Graph


def renewed(graph: Graph) -> Graph:
    """`graph` with new tensors for the updates that would join its blocks, where that is the same;
    the graph itself where there are none."""
    effects, chosen = effects_of(graph), dict[fx.Node, Callable[..., Any]]()
    for node in binding(graph):
        function = _function(node)
        if function is not None and _is_last(node, effects):
            chosen[node] = function
    if not chosen:
        return graph
    rewriting = Rewriting(graph)
    for node in graph.fx_graph.nodes:
        if node in chosen:
            _renew(rewriting, node, chosen[node])
        else:
            rewriting.copy(node)
    return rewriting.rewritten()


def _function(node: fx.Node) -> Callable[..., Any] | None:
    """The operator that returns in a new tensor what a node writes into its first operand; None
    where there is none, where chance would be another, and under `no_grad`, where a new tensor has
    no history."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or is_random(node) or is_unrecorded(node):
        return None
    if list(mutated_operands(node)) != [node.args[0]] or torch.Tag.inplace_view in target.tags:
        return None
    packet = getattr(torch.ops.aten, target._opname.removesuffix("_"), None)
    function = getattr(packet, target._overloadname, None)
    return function if function is not target else None


def _is_last(node: fx.Node, effects: Effects) -> bool:
    """Whether nothing reads the memory that a node updates afterwards, but through its result."""
    root = effects.root(node)
    if root.op == "placeholder":
        return False
    before = [other for other in effects.sharing(root) if effects.is_before(other, node)]
    users = (user for other in before for user in other.users)
    return not any(effects.is_before(node, user) for user in users)


def _renew(rewriting: Rewriting, node: fx.Node, function: Callable[..., Any]) -> None:
    """Let a new tensor of the same dtype stand for the result of an update in place."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), rewriting.nodes.__getitem__)
    values = fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    with torch.no_grad():
        meta = {**node.meta, "val": function(*values[0], **values[1])}
    carries = node.name in rewriting.whole.differentiable
    name = node.name.rstrip("_")
    made = rewriting.insert(name, function, args, meta, carries=carries, kwargs=kwargs)
    rewriting.keep(
        node, rewriting.made.call_function(torch.ops.aten.type_as.default, (made, args[0]))
    )
