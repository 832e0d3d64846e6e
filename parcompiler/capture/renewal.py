"""New tensors instead of updates in place that would force pieces of a model onto one stage.

    for layer in layers:
        x = layer(x)
        total += x             total = total + x        same value, as nothing reads the old one

Stages share no memory, so memory updated in place stays on the stage that made it. If later readers
use only the result of the update, a new tensor is equivalent.
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
    """`graph` with new tensors for in-place sums and products that would join its blocks, where
    that is equivalent; the graph itself if there are none."""
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
    made = rewriting.rewritten()  # the old target, maybe zeros, carries no gradient now
    trainable = [item.node for item in made.parameters if item.trainable]
    carrying = differentiable(made.fx_graph, trainable, made.loss)
    return dataclasses.replace(made, differentiable=carrying)


def _is_replaceable(node: fx.Node, effects: Effects) -> bool:
    """Whether a new tensor is equivalent for all later nodes: they read the memory only through the
    result, with the same layout. Not under `no_grad`, where a new tensor would have no history."""
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
    """The out-of-place version of a node's operator."""
    assert isinstance(node.target, torch._ops.OpOverload)
    packet = getattr(torch.ops.aten, node.target._opname.removesuffix("_"))
    function: Callable[..., Any] = getattr(packet, node.target._overloadname)
    return function


def _value(node: fx.Node) -> torch.Tensor:
    """The result of `_function`, without data."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    with torch.no_grad():
        value: torch.Tensor = _function(node)(*args, **kwargs)
    return value


def _renew(rewriting: Rewriting, node: fx.Node) -> None:
    """Replace the result of an update in place by a new tensor of the same dtype."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), rewriting.nodes.__getitem__)
    meta, name = {**node.meta, "val": _value(node)}, overload_name(node).removesuffix("_")
    carries = node.name in rewriting.whole.differentiable
    made = rewriting.insert(name, _function(node), args, meta, carries=carries, kwargs=kwargs)
    cast = rewriting.made.call_function(torch.ops.aten.type_as.default, (made, args[0]))
    rewriting.keep(node, cast)
