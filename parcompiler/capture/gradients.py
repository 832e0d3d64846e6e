"""Who carries gradients: what is floating, and is reached from a trainable parameter."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from parcompiler.capture.effects import Effects, mutated_operands

_NO_GRADIENT = frozenset(
    "detach zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones "
    "new_empty new_full bernoulli".split()
)


def differentiable(graph: fx.Graph, trainable: set[str]) -> frozenset[str]:
    """Names of the nodes that carry gradients: floating, and reached from a trainable parameter."""
    found, effects = set(trainable), Effects(graph)
    for node in graph.nodes:
        if node.op != "call_function" or not _is_floating(node):
            continue
        contexts = node.meta.get("contexts", ())
        modes = [context[0] for context in contexts if context[0].endswith("_grad")]
        if modes and modes[-1] == "no_grad":
            # What is updated in place there is the tensor that it was, and is used as such.
            if any(operand.name in found for operand in mutated_operands(node)):
                found.add(node.name)
            continue
        if getattr(node.target, "_opname", "") in _NO_GRADIENT:
            continue
        if any(operand.name in found for operand in node.all_input_nodes):
            found.add(node.name)
            # An update in place makes its target carry the gradient too, with what that is a view
            # of and the other views: `y = zeros(...)`, `y[0] = x` and `y` again.
            for operand in mutated_operands(node):
                found.update(_in_memory_of(operand, graph, effects))
    return frozenset(found)


def _in_memory_of(updated: fx.Node, graph: fx.Graph, effects: Effects) -> Iterator[str]:
    """The names of the floating nodes, no placeholders, that lie in the memory of one."""
    root = effects.root(updated)
    for node in graph.nodes:
        if node.op == "call_function" and effects.root(node) is root and _is_floating(node):
            if getattr(node.target, "_opname", "") != "detach":
                yield node.name


def _is_floating(node: fx.Node) -> bool:
    """Whether a node yields a floating or complex tensor, or several of which one is."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    return any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
