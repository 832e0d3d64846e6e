"""The functions between the head's product and its loss, as a small graph of logits [n, V]."""

from __future__ import annotations

import torch
from torch import fx

from parcompiler.capture.effects import overload_name
from parcompiler.graph import dtype_of
from parcompiler.vocabulary.found import FoundHead


def logits_graph(head: FoundHead, rows: int, classes: int) -> fx.Graph | None:
    """Soft caps, scales and casts in order, none of them in place; None when there are none."""
    if not head.functions:
        return None
    graph = fx.Graph()
    logits = graph.placeholder("logits")
    like = head.product.meta["val"]
    logits.meta["val"] = like.new_empty(rows, classes)
    value = logits
    for node in head.functions:
        value = _copied(graph, node, value)
    graph.output(value)
    return graph


def _copied(graph: fx.Graph, node: fx.Node, value: fx.Node) -> fx.Node:
    """One function of `value` instead of the operand that it has in the model."""
    target, name = node.target, overload_name(node)
    if name == "type_as":
        made = graph.call_function(torch.ops.aten.to.dtype, (value, dtype_of(node)))
    else:
        if name.endswith("_"):
            assert isinstance(target, torch._ops.OpOverload)
            packet = getattr(torch.ops.aten, name.removesuffix("_"))
            target = getattr(packet, target._overloadname)
        args = fx.map_arg((node.args, node.kwargs), lambda item: value)
        assert callable(target)
        made = graph.call_function(target, *args)
    made.meta = {k: v for k, v in node.meta.items() if k != "val"}
    made.meta["val"] = value.meta["val"].to(dtype_of(node))
    return made
