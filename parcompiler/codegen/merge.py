"""Nodes whose value another node has already: written once.

Masks and position ids are built by helpers that each start from the same `arange`. Two nodes with
the same operator and the same operands have the same value; so has `x + 0` of whole numbers. Only
nodes without a gradient are merged, since the order in which gradients are added up must stay, and
only where nothing updates their memory or that of their operands in place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from parcompiler.capture.effects import Effects, is_random, mutated_operands
from parcompiler.graph import Graph

NEUTRAL = {"add.Tensor": 0, "sub.Tensor": 0, "mul.Tensor": 1, "div.Tensor": 1}


def merged(
    nodes: Sequence[fx.Node], kept: Collection[fx.Node], graph: Graph, effects: Effects
) -> Mapping[fx.Node, fx.Node]:
    """For each node that need not be written, the one that has its value; never one of `kept`."""
    same: dict[fx.Node, fx.Node] = {}
    first: dict[object, fx.Node] = {}
    for node in nodes:
        if not _is_constant(node, graph, effects):
            continue
        operand = _unchanged(node)
        if operand is None:
            arguments = fx.map_arg((node.args, node.kwargs), lambda item: same.get(item, item))
            operand = first.setdefault(repr(_key(node, arguments)), node)
        if operand is not node and node not in kept:
            same[node] = same.get(operand, operand)
    return same


def _key(node: fx.Node, arguments: object) -> object:
    """What two nodes must share to have the same value; fx nodes print their unique names."""
    return str(node.target), arguments, node.meta.get("contexts", ())


def _is_constant(node: fx.Node, graph: Graph, effects: Effects) -> bool:
    """Whether a node yields a tensor that has no gradient and that nothing changes afterwards."""
    if node.name in graph.differentiable or is_random(node) or any(mutated_operands(node)):
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return not any(effects.writers.get(effects.root(n)) for n in (node, *node.all_input_nodes))


def _unchanged(node: fx.Node) -> fx.Node | None:
    """The operand whose value a node returns as it is: `x + 0`, `x * 1.0`."""
    neutral = NEUTRAL.get(str(node.target).removeprefix("aten."))
    if neutral is None or node.kwargs or len(node.args) != 2:
        return None
    operand, other = node.args
    if not isinstance(operand, fx.Node) or isinstance(other, fx.Node) or other != neutral:
        return None
    before, after = operand.meta.get("val"), node.meta["val"]
    if not isinstance(before, torch.Tensor) or before.dtype != after.dtype:
        return None
    if neutral == 0 and after.dtype.is_floating_point:
        return None  # -0.0 + 0 is 0.0
    return operand
