"""New tensors in place of updates that would keep pieces of a model together.

    for layer in layers:
        x = layer(x)
        total += x             total = total + x        the same value: nobody reads the old one

Stages share no memory, so what is updated in place stays on the stage that has made it. Where
nothing reads the memory afterwards but through the result of the update, a new tensor is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from parcompiler.capture.blocks import joining_updates
from parcompiler.capture.effects import Effects, effects_of, overload_name
from parcompiler.capture.gradients import differentiable, is_unrecorded
from parcompiler.capture.rewriting import Rewriting
from parcompiler.graph import Graph

_SUMS = ("add_", "sub_", "mul_", "div_")


def renewed(graph: Graph) -> Graph:
    """`graph` with new tensors for the sums and products in place that would join its blocks, where
    that is the same; the graph itself where there are none."""
    effects = effects_of(graph)
    chosen = {node for node in joining_updates(graph) if _is_replaceable(node, effects)}
    if not chosen:
        return graph
    rewriting = Rewriting(graph)
    for node in graph.fx_graph.nodes:
        if node in chosen:
            _renew(rewriting, node)
        else:
            rewriting.copy(node)
    made = rewriting.rewritten()  # what was updated, zeros maybe, carries no gradient any more
    trainable = [item.node for item in made.parameters if item.trainable]
    carrying = differentiable(made.fx_graph, trainable, made.loss)
    return dataclasses.replace(made, differentiable=carrying)


def _is_replaceable(node: fx.Node, effects: Effects) -> bool:
    """Whether a new tensor is the same to all that follows: nothing reads the memory afterwards but
    through the result, whose elements have the same places. Under `no_grad` a new tensor would have
    no history."""
    root = effects.root(node)
    if overload_name(node) not in _SUMS or is_unrecorded(node) or root.op == "placeholder":
        return False
    before = [other for other in effects.sharing(root) if effects.is_before(other, node)]
    users = (user for other in before for user in other.users)
    if any(effects.is_before(node, user) for user in users):
        return False
    value, made = node.meta["val"], _value(node)
    return bool(made.shape == value.shape and made.stride() == value.stride())


def _function(node: fx.Node) -> Callable[..., Any]:
    """The operator that returns in a new tensor what a node writes into its first operand."""
    assert isinstance(node.target, torch._ops.OpOverload)
    packet = getattr(torch.ops.aten, node.target._opname.removesuffix("_"))
    function: Callable[..., Any] = getattr(packet, node.target._overloadname)
    return function


def _value(node: fx.Node) -> torch.Tensor:
    """What that returns, without data."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    with torch.no_grad():
        value: torch.Tensor = _function(node)(*args, **kwargs)
    return value


def _renew(rewriting: Rewriting, node: fx.Node) -> None:
    """Let a new tensor of the same dtype stand for the result of an update in place."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), rewriting.nodes.__getitem__)
    meta, name = {**node.meta, "val": _value(node)}, overload_name(node).removesuffix("_")
    carries = node.name in rewriting.whole.differentiable
    made = rewriting.insert(name, _function(node), args, meta, carries=carries, kwargs=kwargs)
    cast = rewriting.made.call_function(torch.ops.aten.type_as.default, (made, args[0]))
    rewriting.keep(node, cast)
