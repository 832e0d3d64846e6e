"""The nodes that one call of a layer was traced to, and their copies for a layer that is equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from parcompiler.capture.repeatable import is_repeatable
from parcompiler.capture.replay.alike import form

Stack = dict[str, tuple[str, Any]]  # of modules: for each its path and class
Source = tuple[str, int | str]  # ("argument", which tensor) or ("own", the name of a parameter)


@dataclass(frozen=True)
class Span:
    """Consecutive nodes; `stack` is that of the layer itself, `outside` what its operands are.

    `result` is what the layer returns, with a `Result` for each tensor; `made` are those of them
    that its nodes yield.
    """

    nodes: tuple[fx.Node, ...]
    stack: Stack
    outside: Mapping[fx.Node, Source]
    result: Any
    made: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Result:
    """A tensor that a layer returns: one of its arguments, or what one of its nodes yields."""

    kind: Literal["argument", "node"]
    number: int


def is_copyable(span: Span) -> bool:
    """Whether nodes depend on the arguments and own tensors alone, and change nothing else."""
    nodes, outside = span.nodes, span.outside
    inside = set(nodes)
    operands = {operand for node in nodes for operand in node.all_input_nodes}
    return (
        bool(nodes)
        and all(node.op == "call_function" and _is_fixed(node) for node in nodes)
        and all(operand in inside or operand in outside for operand in operands)
        and is_repeatable(nodes)
    )


def _is_fixed(node: fx.Node) -> bool:
    """Whether a node is an operator on tensors whose sizes are numbers."""
    if isinstance(node.target, torch._ops.HigherOrderOperator) or "unbacked_bindings" in node.meta:
        return False
    if isinstance(node.target, torch._ops.OpOverload) and _reshapes(node.target):
        return False
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return all(
        item is None
        or (isinstance(item, torch.Tensor) and all(type(size) is int for size in item.shape))
        for item in values
    )


def _reshapes(target: torch._ops.OpOverload) -> bool:
    """Whether an operator changes the shape or the memory of its operand in place."""
    return torch.Tag.inplace_view in target.tags or target._opname in ("set_", "resize_")


def copied(
    span: Span, graph: fx.Graph, stack: Stack, own: Mapping[Source, fx.Node]
) -> list[fx.Node]:
    """The nodes of a span, at the end of `graph`, as those of another layer.

    `stack` is where that stands, `own` the nodes of its arguments and tensors.
    """
    nodes = {node: own[source] for node, source in span.outside.items()}
    stacks: dict[tuple[str, ...], Stack] = {}
    for node in span.nodes:
        copy = graph.node_copy(node, nodes.__getitem__)  # with the name that it would have
        before = node.meta["nn_module_stack"]
        key = tuple(before)
        if key not in stacks:
            stacks[key] = moved(before, span.stack, stack)
        copy.meta["nn_module_stack"] = dict(stacks[key])
        nodes[node] = copy
    return [nodes[node] for node in span.nodes]


def moved(stack: Stack, before: Stack, after: Stack) -> Stack:
    """The modules around a node of one layer as those around a node of another.

    >>> moved({"m": ("m", "M"), "m.0": ("m.0", "L"), "m.0.up": ("m.0.up", "Up")},
    ...       {"m": ("m", "M"), "m.0": ("m.0", "L")}, {"m": ("m", "M"), "m.1": ("m.1", "L")})
    {'m': ('m', 'M'), 'm.1': ('m.1', 'L'), 'm.1.up': ('m.1.up', 'Up')}
    """
    old, new = path_of(before), path_of(after)
    outer = {key: (path, _name(kind)) for key, (path, kind) in after.items()}
    inner = list(stack.items())[len(before) :]
    return outer | {
        new + key.removeprefix(old): (new + path.removeprefix(old), kind)
        for key, (path, kind) in inner
    }


def path_of(stack: Stack) -> str:
    """The path of the innermost module."""
    path: str = next(reversed(stack.values()))[0]
    return path


def _name(kind: Any) -> str:
    """A class as nodes remember it."""
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)


def equal(a: Span, b: Span) -> bool:
    """Whether `b` is node for node what `copied` makes of `a`."""
    if len(a.nodes) != len(b.nodes) or repr(a.result) != repr(b.result):
        return False
    if [form(tensor) for tensor in a.made] != [form(tensor) for tensor in b.made]:
        return False
    there = {source: node for node, source in b.outside.items()}
    if set(a.outside.values()) != set(there):
        return False
    nodes = {node: there[source] for node, source in a.outside.items()}
    for ours, theirs in zip(a.nodes, b.nodes, strict=True):
        arguments = fx.map_arg((ours.args, ours.kwargs), nodes.__getitem__)
        # By their text: floats are told apart to the last bit, and nodes have their names.
        if repr((ours.target, arguments)) != repr((theirs.target, (theirs.args, theirs.kwargs))):
            return False
        if list(_known(ours, moved(ours.meta["nn_module_stack"], a.stack, b.stack))) != list(
            _known(theirs, theirs.meta["nn_module_stack"])
        ):
            return False
        nodes[ours] = theirs
    return True


def _known(node: fx.Node, stack: Stack) -> Iterator[Any]:
    """What nodes remember that the compiler reads, and that is the same for equal layers."""
    yield list(stack.items())
    yield node.meta.get("stack_trace")
    value = node.meta.get("val")
    for item in value if isinstance(value, list | tuple) else [value]:
        yield form(item) if isinstance(item, torch.Tensor) else item
