"""Nodes that carry gradients: floating, dependent on a trainable parameter, and leading to the
loss.

weight ─► y ─► loss          weight and y carry gradients
          └─► detach ─► z    no differentiable path leads from z to the loss: autograd skips
other ─► z                   it, and `other` has no gradient, not even one of zeros
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from parcompiler.capture.effects import Effects, mutated_operands, overload_name
from parcompiler.graph import Graph, is_floating, tensors_of

_NO_GRADIENT = frozenset(
    "detach detach_ zeros_like ones_like empty_like full_like rand_like randn_like new_zeros "
    "new_ones new_empty new_full histc".split()
)

# The second operand gives a type or a shape, or is the value of evaluations.
_LIKE_ANOTHER = frozenset("type_as to expand_as view_as reshape_as by_mode".split())


def differentiable(graph: fx.Graph, trainable: Collection[str], loss: fx.Node) -> frozenset[str]:
    """Names of the nodes that carry gradients, placeholders of parameters among them."""
    effects = Effects(graph)
    recorded = requiring(graph, trainable, effects)
    carrying = {loss} if loss.name in recorded else set()
    for node in reversed(graph.nodes):  # nodes that autograd reaches, from the loss on
        if node in carrying:
            for source in _sources(node):
                ways = source, *effects.earlier_writers(source, node)
                carrying.update(way for way in ways if way.name in recorded)
    return frozenset(node.name for node in carrying)


def requiring(
    graph: fx.Graph, trainable: Collection[str], effects: Effects | None = None
) -> frozenset[str]:
    """Names of the nodes that autograd keeps a history of: floating, from a trainable parameter."""
    recorded, effects = set(trainable), effects or Effects(graph)
    for node in graph.nodes:
        if node.op != "call_function" or not _is_floating(node):
            continue
        if any(operand.name in recorded for operand in _sources(node)):
            recorded.add(node.name)
            # After an update in place its target carries the gradient too, as do its base and other
            # views: `y = zeros(...)`, `y[0] = x` and `y` again.
            updated = () if is_unrecorded(node) else mutated_operands(node)
            for root in {effects.root(operand) for operand in updated}:
                recorded.update(
                    other.name
                    for other in graph.nodes
                    if other.op == "call_function"
                    and effects.root(other) is root
                    and _is_floating(other)
                    and overload_name(other) != "detach"
                )
    return frozenset(recorded)


def recorded_in(graph: Graph) -> frozenset[str]:
    """Names of the nodes of a model that autograd keeps a history of, also if it does not lead to
    the loss."""
    return graph.once("requiring", lambda: requiring(graph.fx_graph, graph.differentiable))


def _sources(node: fx.Node) -> Iterable[fx.Node]:
    """The operands that a node's gradient flows to."""
    if is_unrecorded(node):
        # A tensor updated in place there keeps its history, and is used with it.
        source = returned(node)
        return mutated_operands(node) if source is None else (source,)
    if overload_name(node) in _LIKE_ANOTHER:
        return node.all_input_nodes[:1]
    return () if overload_name(node) in _NO_GRADIENT else node.all_input_nodes


def is_unrecorded(node: fx.Node) -> bool:
    """Whether a node stands under `no_grad`."""
    modes = [item[0] for item in node.meta.get("contexts", ()) if item[0].endswith("_grad")]
    return bool(modes) and modes[-1] == "no_grad"


def returned(node: fx.Node) -> fx.Node | None:
    """The operand that an operator returns as it is, such as `to` without a change of dtype.

    Such a result keeps its history under `no_grad`; the result of any other operator, a view
    included, has none there. Found by running the operator on tensors without data.
    """
    value, tensors = node.meta.get("val"), dict[fx.Node, torch.Tensor]()
    if not (isinstance(node.target, torch._ops.OpOverload) and isinstance(value, torch.Tensor)):
        return None
    if node.target._schema.is_mutable:
        return None

    def stand_in(operand: fx.Node) -> Any:
        like = operand.meta.get("val")
        if isinstance(like, torch.Tensor) and operand not in tensors:
            size, stride = like.shape, like.stride()
            tensors[operand] = torch.empty_strided(size, stride, dtype=like.dtype, device="meta")
        return tensors.get(operand, like)

    call = fx.map_arg((node.args, node.kwargs), stand_in)
    if all((one.shape, one.dtype) != (value.shape, value.dtype) for one in tensors.values()):
        return None
    meta = torch.device("meta")
    args, kwargs = pytree.tree_map_only(torch.device, lambda _: meta, call)
    try:
        result = node.target(*args, **kwargs)
    except (RuntimeError, TypeError, NotImplementedError):  # not without data
        return None
    return next((operand for operand, tensor in tensors.items() if tensor is result), None)


def _is_floating(node: fx.Node) -> bool:
    """Whether a node yields a floating or complex tensor, or several of which one is."""
    return any(map(is_floating, tensors_of(node.meta.get("val"))))
