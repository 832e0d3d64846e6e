"""The local variables of an emitted forward: its arguments, and the names that its lines assign.

A name is free again once its value is no longer needed. Until it is reassigned, or to the end of
the forward, the variable keeps the value alive, so memory costs depend on these names too:

    y = F.rms_norm(x, ...)
    q = runtime.linear(y, ...)      reads y the last time
    y = F.scaled_dot_product(...)   frees the first y
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import fx

from parcompiler.capture.effects import is_statement, mutated_operands, outside
from parcompiler.capture.templates import EMITTED, unique
from parcompiler.graph import Graph
from parcompiler.naming.source import candidate_names, spoken_name
from parcompiler.spmd.runtime_call import is_conversion


def argument_names(
    graph: Graph, instances: Sequence[Sequence[fx.Node]], variables: Mapping[fx.Node, str]
) -> dict[fx.Node, str]:
    """Names of the arguments of a layer's forward: the most frequent names in the source.

    `instances` are the inputs of each layer that runs the forward; those of the first are named.
    `variables` has the names of values outside; that of a layer's result names the layer, and is
    not used for an argument.
    """

    def wish(node: fx.Node) -> str:
        outside = variables.get(node, node.name)
        if node.op == "placeholder":
            return outside
        return spoken_name(node) or ("x" if node.name in graph.differentiable else outside)

    names: dict[fx.Node, str] = {}
    taken: set[str] = set(EMITTED)
    for nodes in zip(*instances, strict=True):
        wished = Counter[str]()
        for node, count in Counter(nodes).items():  # all layers may read one value
            wished[wish(node)] += count
        names[nodes[0]] = unique(wished.most_common(1)[0][0], taken)
    return names


def overwritten(
    nodes: Sequence[fx.Node], arguments: Mapping[fx.Node, str], outputs: Sequence[fx.Node]
) -> dict[fx.Node, list[fx.Node]]:
    """For each node of a block, the nodes whose variables its line reassigns, which frees their
    values.

    `arguments` are the names of the block's inputs, `outputs` its results. Every node is assumed to
    have a line.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> nodes = [x]
    >>> for _ in range(3):
    ...     nodes.append(graph.call_function(torch.ops.aten.relu.default, (nodes[-1],)))
    >>> overwritten(nodes[1:], {x: "x"}, nodes[-1:])
    {relu_default_1: [relu_default], relu_default_2: [relu_default_1]}
    """
    operands = {node: f"self.{node.name}" for node in outside(nodes)}
    operands |= arguments
    variables = Variables(nodes, dict.fromkeys(outputs), operands)
    values: dict[str, list[fx.Node]] = defaultdict(list)  # of each variable
    ended: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    placed = set[fx.Node]()
    for node in variables.written:
        names = variables.assign(node)
        if names is None:
            whole = node.all_input_nodes[0]
            if node is max(whole.users, key=variables.position.__getitem__):
                ended[node].append(whole)
            continue
        for name in names:
            ended[node] += values.pop(name, ())
        for item in {node: None, **node.users}:  # parts of a tuple have names, it has none
            if item in variables.names and item not in placed:
                values[variables.names[item]].append(item)
                placed.add(item)
    return {node: items for node, items in ended.items() if items}


class Variables:
    """Names the nodes of a forward in order.

    `operands` names existing values; `fixed` are names that no variable may take. `outputs` live to
    the end, under the given name if any. `same` maps nodes that are not written to one with the
    same value.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        outputs: Mapping[fx.Node, str | None],
        operands: Mapping[fx.Node, str],
        fixed: Iterable[str] = (),
        same: Mapping[fx.Node, fx.Node] | None = None,
    ) -> None:
        self.names = dict(operands)  # so far
        self._fixed = {*EMITTED, *fixed}
        self._same = same or {}
        self.written = [node for node in nodes if node not in self._same]
        self.position = {node: i for i, node in enumerate(self.written)}
        self._last = {read: i for i, node in enumerate(self.written) for read in self._reads(node)}
        self._last |= dict.fromkeys(outputs, len(self.written))
        self._output_names = {node: name for node, name in outputs.items() if name is not None}

    def name(self, node: fx.Node) -> str:
        """The expression for a node's value."""
        return self.names[self._same.get(node, node)]

    def assign(self, node: fx.Node) -> tuple[str, ...] | None:
        """The names that a node's line assigns: several to unpack a tuple, () if there is nothing
        to assign. None if no line is needed, as the tuple was unpacked already."""
        if node.target is operator.getitem and node in self.names:
            return None
        target = _updated(node)
        if is_statement(node) or (target is not None and node not in self._output_names):
            if target is not None:
                self.names[node] = self.names[target]
            return ()
        pieces = self._pieces(node)
        if pieces:
            return tuple(self._unpacked(node, pieces))
        self.names[node] = self._output_names.get(node) or self._choose(node)
        return (self.names[node],)

    def _reads(self, node: fx.Node) -> Iterator[fx.Node]:
        """The operands of a node, mapped by `same`."""
        return (self._same.get(operand, operand) for operand in node.all_input_nodes)

    def _pieces(self, node: fx.Node) -> dict[int, fx.Node]:
        """The nodes that unpack a tuple, if those are its only users."""
        value = node.meta.get("val")
        users = list(node.users)
        if not isinstance(value, list | tuple) or self._last.get(node) == len(self.position):
            return {}
        if not all(u.target is operator.getitem and u in self.position for u in users):
            return {}
        if len(users) != len({str(u.args[1]) for u in users}) or len(users) < 2:
            return {}
        return {int(str(u.args[1])): u for u in users}

    def _unpacked(self, node: fx.Node, pieces: Mapping[int, fx.Node]) -> Iterator[str]:
        """`q`, `k`, `v`: the names of a tuple's parts."""
        now = self.position[node]
        for index in range(len(node.meta["val"])):
            piece = pieces.get(index)
            if piece is None:
                yield "_"
            else:
                self.names[piece] = self._output_names.get(piece) or self._choose(piece, now, index)
                yield self.names[piece]

    def _choose(self, node: fx.Node, now: int | None = None, index: int | None = None) -> str:
        """A free name for a value; `index` for a part of a tuple."""
        position = self.position[node] if now is None else now
        operand = next(self._reads(node if index is None else node.all_input_nodes[0]), None)
        text = self.names.get(operand, "") if operand is not None else ""
        if is_conversion(node):
            text = text.removeprefix("self.")  # a tensor of the layer in another placement
        candidates = list(candidate_names(node, text if text.isidentifier() else None, index))
        for candidate in candidates:
            if self._is_free(candidate, node, position):
                return candidate
        numbered = (f"{candidates[-1]}_{count}" for count in itertools.count(2))
        return next(name for name in numbered if self._is_free(name, node, position))

    def _is_free(self, name: str, node: fx.Node, position: int) -> bool:
        """Whether `node` may have a name: no value that is read later has it."""
        if name in self._fixed:
            return False
        end = self._last.get(node, position)
        if any(
            text == name and self.position.get(owner, -1) < end
            for owner, text in self._output_names.items()
            if owner is not node
        ):
            return False
        return not any(
            self._last.get(other, -1) > position
            for other, text in self.names.items()
            if text == name
        )


def _updated(node: fx.Node) -> fx.Node | None:
    """The operand that a node updates in place and returns: `x.relu_()` is `x`."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    returns = node.target._schema.returns
    writes = [item.alias_info for item in returns if item.alias_info is not None]
    if len(returns) != 1 or not any(item.is_write for item in writes):
        return None
    return next(mutated_operands(node), None)
