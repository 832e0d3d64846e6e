"""Side effects of the operators of a graph: views, updates in place, random draws.

Autograd sees views and in-place updates by itself as long as they run in order in one process.
Where the graph is cut they matter: a view shares memory with its base, and an update in place makes
another value.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import fx

from parcompiler.capture.functions import Applied
from parcompiler.graph import Graph

# Arguments that say whether an operator computes as in training; emitted code follows the mode.
MODES = frozenset({"train", "training", "use_input_stats", "dropout_p"})
CASTS = ("to", "_to_copy", "type_as")  # operators that change a dtype
_MAYBE_COPIES = {"to", "reshape", "contiguous", "type_as", "float", "double", "half", "flatten"}
_TRAINING_NORMS = {"batch_norm", "instance_norm", "native_batch_norm"}


def overload_name(node: fx.Node) -> str:
    """The operator's name without its overload: `add_` for `aten.add_.Tensor`."""
    target = node.target
    return target._opname if isinstance(target, torch._ops.OpOverload) else ""


def name_of(node: fx.Node) -> str:
    """The function that a node calls, an operator without its overload; empty for a placeholder."""
    if node.op != "call_function":
        return ""
    return str(getattr(node.target, "_opname", getattr(node.target, "__name__", node.target)))


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """All arguments of an ATen node by name, with the defaults of those that are not given.

    >>> graph = fx.Graph()
    >>> half = graph.call_function(torch.ops.aten.mul.Tensor, (graph.placeholder("x"), 0.5))
    >>> name_of(half), arguments_of(half)["other"]
    ('mul', 0.5)
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return dict(node.kwargs)
    return bound(node.target, node.args, node.kwargs)


def bound(
    target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of an operator by name, with its defaults."""
    schema = target._schema.arguments
    values = {a.name: a.default_value for a in schema if a.has_default_value()}
    values |= {argument.name: value for argument, value in zip(schema, args, strict=False)}
    values |= kwargs
    return {argument.name: values[argument.name] for argument in schema if argument.name in values}


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers (dropout in training mode with p > 0, say)."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        drops = _number(node.kwargs.get("dropout_p", 0.0)) > 0.0  # attention of a rank
        return drops or bool(getattr(target, "random", False))
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    name = target._opname
    if "dropout" in name:
        return node.args[2] is True and _number(node.args[1]) > 0.0
    if name == "scaled_dot_product_attention":
        return _number(arguments_of(node)["dropout_p"]) > 0.0
    return True


def draws_in_evaluation(node: fx.Node) -> bool:
    """Whether a node draws random numbers whatever mode it is in: it has no argument for that."""
    return is_random(node) and not MODES & arguments_of(node).keys()


def _number(value: object) -> float:
    """A probability as a float; 1 if it is not a number."""
    return float(value) if isinstance(value, int | float) else 1.0


def mutated_operands(node: fx.Node) -> Iterator[fx.Node]:
    """The operands that a node updates in place."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not _may_write(target):
        return
    arguments = arguments_of(node)
    for argument in target._schema.arguments:
        value = arguments.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            values = value if isinstance(value, list | tuple) else [value]
            yield from (item for item in values if isinstance(item, fx.Node))
    # The schema does not declare updates of running statistics.
    if target._opname in _TRAINING_NORMS and (
        arguments.get("training") or arguments.get("use_input_stats")
    ):
        statistics = (arguments.get(name) for name in ("running_mean", "running_var"))
        yield from (item for item in statistics if isinstance(item, fx.Node))


def is_statement(node: fx.Node) -> bool:
    """Whether a node matters only for its effect, such as an in-place update that nothing reads.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> is_statement(graph.call_function(torch.ops.aten.add_.Tensor, (x, 1)))
    True
    """
    if node.users or not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    return bool(schema.is_mutable) or not schema.returns


@lru_cache(maxsize=1024)
def _may_write(target: torch._ops.OpOverload) -> bool:
    """Whether an operator can update one of its operands."""
    infos = [argument.alias_info for argument in target._schema.arguments]
    written = any(info is not None and info.is_write for info in infos)
    return written or target._opname in _TRAINING_NORMS


@lru_cache(maxsize=1024)
def _may_share(target: torch._ops.OpOverload) -> bool:
    """Whether the result of an operator may lie in the memory of its operand."""
    aliased = any(item.alias_info is not None for item in target._schema.returns)
    return aliased or torch.Tag.maybe_aliasing_or_mutating in target.tags


def outside(nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """The nodes that `nodes` read and that are not among them, by first use."""
    inside = set(nodes)
    read = (operand for node in nodes for operand in node.all_input_nodes)
    return (node for node in dict.fromkeys(read) if node not in inside)


def base_of(node: fx.Node) -> fx.Node | None:
    """The operand whose memory a node's value may share; None when the value is new."""
    target = node.target
    if target is operator.getitem:
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    # Functions and conversions may return their operand itself.
    shares = isinstance(target, Applied) or getattr(target, "shares", False)
    if shares or (isinstance(target, torch._ops.OpOverload) and _may_share(target)):
        return next(iter(node.all_input_nodes), None)
    return None


def viewed(node: fx.Node) -> fx.Node:
    """The node whose value a view shows; the node itself if it is no view, or may be a copy.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> viewed(graph.call_function(torch.ops.aten.unsqueeze.default, (x, 0))) is x
    True
    """
    while (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.is_view
        and node.target._opname not in _MAYBE_COPIES
        and (base := base_of(node)) is not None
    ):
        node = base
    return node


def saves_early(nodes: Sequence[fx.Node]) -> bool:
    """Whether some node saves memory for its backward before it has written it: the noise of
    `rrelu`."""
    return any(overload_name(node) == "rrelu" for node in nodes)


def is_repeatable(nodes: Sequence[fx.Node]) -> bool:
    """Whether nodes may run twice: they update in place only memory that they make themselves.

    A block whose activations are recomputed runs twice for each micro-batch. Running statistics,
    say, would then be updated twice. Also, torch ends the second run as soon as all saved tensors
    are there.

    >>> graph = fx.Graph()
    >>> count, x = graph.placeholder("count"), graph.placeholder("x")
    >>> added = graph.call_function(torch.ops.aten.add_.Tensor, (count, 1))
    >>> doubled = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    >>> halved = graph.call_function(torch.ops.aten.div_.Tensor, (doubled, 2))
    >>> is_repeatable([doubled, halved]), is_repeatable([added])
    (True, False)
    """
    if saves_early(nodes):
        return False
    inside = set(nodes)
    for updated in (operand for node in nodes for operand in mutated_operands(node)):
        while updated in inside and (base := base_of(updated)) is not None:
            updated = base
        if updated not in inside:
            return False
    return True


def effects_of(graph: Graph) -> Effects:
    """The effects of a captured graph, which are kept with it."""
    return graph.once("effects", lambda: Effects(graph.fx_graph))


class Effects:
    """Views and updates of a whole graph: which nodes share memory, and which write it."""

    def __init__(self, graph: fx.Graph) -> None:
        self._position = {node: index for index, node in enumerate(graph.nodes)}
        self._root: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            base = base_of(node) if node.op == "call_function" else None
            self._root[node] = node if base is None else self._root[base]

    def root(self, node: fx.Node) -> fx.Node:
        """The node that made the memory which `node`'s value lies in."""
        return self._root[node]

    def sharing(self, root: fx.Node) -> list[fx.Node]:
        """The nodes whose values lie in the memory that a node has made, in order."""
        return [node for node, other in self._root.items() if other is root]

    def is_before(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether a node comes before another."""
        return self._position[one] < self._position[other]

    @cached_property
    def writers(self) -> dict[fx.Node, list[fx.Node]]:
        """For each root the nodes that update its memory in place, in order."""
        writers: dict[fx.Node, list[fx.Node]] = {}
        for node in self._position:
            for operand in mutated_operands(node):
                writers.setdefault(self.root(operand), []).append(node)
        return writers

    def is_settled(self, node: fx.Node) -> bool:
        """Whether nothing updates the memory of a node's value after it."""
        writers = self.writers.get(self.root(node), ())
        return all(self._position[writer] < self._position[node] for writer in writers)

    def is_last_use(self, writer: fx.Node) -> bool:
        """Whether after an update in place nothing reads its memory under an earlier name."""
        return all(
            self.is_before(writer, node) or not self.is_before(writer, user)
            for operand in mutated_operands(writer)
            for node in self.sharing(self.root(operand))
            for user in node.users
            if node is not writer
        )

    def early_readers(self, roots: Collection[fx.Node]) -> set[fx.Node]:
        """Readers of the memory of `roots`, or of a view of it, before its last update."""
        ends = {
            root: max(self._position[writer] for writer in writers)
            for root, writers in self.writers.items()
            if root in roots
        }
        return {
            user
            for node, root in self._root.items()
            if root in ends
            for user in node.users
            if user.op == "call_function" and self._position[user] < ends[root]
        }

    def earlier_writers(self, operand: fx.Node, node: fx.Node) -> Iterator[fx.Node]:
        """The nodes that update the memory of an operand before `node` reads it."""
        for writer in self.writers.get(self.root(operand), ()):
            if self._position[writer] < self._position[node]:
                yield writer

    def dependencies(self, node: fx.Node) -> Iterator[fx.Node]:
        """The nodes that must have run before `node`: its operands, and earlier writers of them."""
        for operand in node.all_input_nodes:
            yield operand
            yield from self.earlier_writers(operand, node)

    def behind(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """These nodes, and all that must have run before them."""
        behind, pending = set[fx.Node](), list(nodes)
        while pending:
            node = pending.pop()
            if node not in behind:
                behind.add(node)
                pending.extend(self.dependencies(node))
        return behind
