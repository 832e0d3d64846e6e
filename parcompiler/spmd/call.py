"""A call of an operator as the rules read it: arguments by name, operands and results."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import fx

from parcompiler.capture.effects import bound
from parcompiler.graph import Graph, is_floating, tensors_of

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor among the arguments; `index` is its place in an argument that is a list."""

    argument: str
    index: int | None
    node: fx.Node
    value: torch.Tensor
    differentiable: bool

    @property
    def shape(self) -> Shape:
        """Its shape; sizes that are not known before the step are -1."""
        return shape_of(self.value)


@dataclass(frozen=True, slots=True)
class NodeCall:
    """One node of a graph. Two operands may be the same node.

    `results` are the tensors that it yields, in order, and `carries` tells which of them receive a
    gradient. `arguments` includes defaults.
    """

    node: fx.Node
    name: str
    overload: str
    arguments: Mapping[str, Any]
    operands: tuple[Operand, ...]
    results: tuple[torch.Tensor, ...]
    carries: tuple[bool, ...]

    @property
    def base(self) -> str:
        """The operator's name without its library, and without the underscore of an in-place
        one."""
        name = self.name.rpartition("::")[2]
        return name if name.startswith("__") else name.rstrip("_")

    @property
    def is_item(self) -> bool:
        """Whether this is one of several results of another node."""
        return self.node.target is operator.getitem

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the operands."""
        return tuple(operand.shape for operand in self.operands)

    @property
    def result_shapes(self) -> tuple[Shape, ...]:
        """The shapes of the results."""
        return tuple(map(shape_of, self.results))

    @property
    def is_plain(self) -> bool:
        """Whether every size is known, and it has results."""
        known = all(-1 not in shape for shape in (*self.shapes, *self.result_shapes))
        return known and bool(self.results)

    @property
    def gradients(self) -> tuple[bool, ...]:
        """Which operands a gradient goes to."""
        reached = any(self.carries)
        return tuple(reached and operand.differentiable for operand in self.operands)

    def operand(self, argument: str) -> Operand | None:
        """The operand for `argument`; None if that is not a tensor."""
        return next((item for item in self.operands if item.argument == argument), None)

    def dims(self, argument: str, rank: int) -> tuple[int, ...]:
        """The dimensions that an argument names, counted from the front; all for None or []."""
        named = self.arguments.get(argument)
        if named is None or named == []:
            return tuple(range(rank))
        listed = [named] if isinstance(named, int) else list(named)
        return tuple(dim % rank for dim in listed) if rank else ()

    def filled(
        self, values: Sequence[Any], other: Callable[[Any], Any] = lambda item: item
    ) -> dict[str, Any]:
        """The arguments by name, with `values` for the operands; anything else goes through
        `other`."""
        places = ((operand.argument, operand.index) for operand in self.operands)
        known = dict(zip(places, values, strict=True))

        def local(name: str, index: int | None, item: Any) -> Any:
            return known[name, index] if (name, index) in known else other(item)

        return {
            name: [local(name, index, item) for index, item in enumerate(value)]
            if isinstance(value, list | tuple)
            else local(name, None, value)
            for name, value in self.arguments.items()
        }

    def passed(self, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments by name, as the node passes them: by position or by keyword."""
        positional = islice(self.arguments, len(self.node.args))
        return tuple(map(arguments.__getitem__, positional)), {
            name: arguments[name] for name in self.node.kwargs
        }


def read(node: fx.Node, differentiable: Container[str] | None = None) -> NodeCall:
    """The call of `node`.

    `differentiable` are the names of the nodes that carry gradients; by default these are the
    floating ones, and results with such an operand.
    """
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name, overload = target._schema.name, target._schema.overload_name
        arguments = bound(target, node.args, node.kwargs)
    else:
        name, overload = str(target), ""
        arguments = {str(index): value for index, value in enumerate(node.args)} | node.kwargs
    carries = differentiable is None or node.name in differentiable
    if target is operator.getitem and isinstance(node.args[0], fx.Node):
        # The operand of an item of several results is that result.
        operands: tuple[Operand, ...] = ()
        if isinstance(value := node.meta.get("val"), torch.Tensor):
            carried = carries and is_floating(value)
            operands = (Operand("0", None, node.args[0], value, carried),)
    else:
        operands = tuple(_operands(arguments, differentiable))
    results = tuple(tensors_of(node.meta.get("val")))
    # A named node carries a gradient, if only through a later update of its memory.
    named = differentiable is not None
    reached = carries and (named or any(operand.differentiable for operand in operands))
    reaches = tuple(reached and is_floating(result) for result in results)
    return NodeCall(node, name, overload, arguments, operands, results, reaches)


def call_of(node: fx.Node, graph: Graph) -> NodeCall:
    """The call of a node of a captured graph, cached."""
    return graph.once(("call", node), lambda: read(node, graph.differentiable))


def shape_of(value: torch.Tensor) -> Shape:
    """The shape of a tensor; sizes that are not known before the step are -1."""
    return tuple(size if isinstance(size, int) else -1 for size in value.shape)


def written(call: NodeCall) -> tuple[int, ...]:
    """The indices of the operands that a call updates in place."""
    target = call.node.target
    if not isinstance(target, torch._ops.OpOverload):
        return ()
    names = {
        argument.name
        for argument in target._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    return tuple(i for i, operand in enumerate(call.operands) if operand.argument in names)


def _operands(
    arguments: Mapping[str, Any], differentiable: Container[str] | None
) -> Iterator[Operand]:
    for argument, value in arguments.items():
        listed = isinstance(value, list | tuple)
        for index, item in enumerate(value if listed else (value,)):
            if not isinstance(item, fx.Node):
                continue
            for tensor in tensors_of(item.meta.get("val")):
                carries = differentiable is None or item.name in differentiable
                place = index if listed else None
                yield Operand(argument, place, item, tensor, carries and is_floating(tensor))
