"""The statements of a forward: one line per operation, with the model's own variable names."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import fx

from parcompiler.capture.blocks import steps
from parcompiler.capture.clean import Context
from parcompiler.capture.effects import Effects, mutated_operands
from parcompiler.capture.templates import EMITTED, identifier
from parcompiler.codegen.layout import remarked, wrap
from parcompiler.codegen.literals import literal
from parcompiler.codegen.merge import merged
from parcompiler.codegen.operators import expression, is_statement
from parcompiler.codegen.quoting import comment
from parcompiler.codegen.registry import home_of
from parcompiler.codegen.wishes import wishes
from parcompiler.graph import Graph
from parcompiler.spmd.exchange import Exchange, is_conversion

INDENT = 8


class Body:
    """Writes nodes as statements; a name is free again once its value is no longer needed.

    `operands` names what is there before; `fixed` are names that no variable may take; `deferring`
    are nodes that can leave the gradient of their weight for later.
    """

    def __init__(
        self,
        graph: Graph,
        effects: Effects,
        operands: Mapping[fx.Node, str],
        fixed: Iterable[str] = (),
        scope: str = "",
        deferring: Collection[fx.Node] = (),
    ) -> None:
        self._graph = graph
        self._effects = effects
        self._names = dict(operands)
        homes = {home_of(node) for node in graph.fx_graph.nodes if node.op == "call_function"}
        self._fixed = {*EMITTED, *fixed, *(home.partition(".")[0] for home in homes)}
        self._scope = scope
        self._deferring = deferring
        self._same: Mapping[fx.Node, fx.Node] = {}
        self._last: dict[fx.Node, int] = {}
        self._given: dict[fx.Node, str] = {}
        self._position: dict[fx.Node, int] = {}

    def lines(self, nodes: Sequence[fx.Node], outputs: Mapping[fx.Node, str | None]) -> list[str]:
        """The statements; `outputs` live to the end, under a given name or one of their own."""
        self._same = merged(nodes, outputs, self._graph, self._effects)
        kept = [node for node in nodes if node not in self._same]
        self._position = {node: i for i, node in enumerate(kept)}
        self._last = {operand: i for i, node in enumerate(kept) for operand in self._reads(node)}
        self._last |= dict.fromkeys(outputs, len(kept))
        self._given = {node: name for node, name in outputs.items() if name is not None}
        return list(self._statements(kept))

    def name(self, node: fx.Node) -> str:
        """The text that stands for a node's value."""
        return self._names[self._same.get(node, node)]

    def _reads(self, node: fx.Node) -> Iterator[fx.Node]:
        """The operands of a node, each as the node that is written for it."""
        return (self._same.get(operand, operand) for operand in node.all_input_nodes)

    def _statements(self, nodes: Sequence[fx.Node]) -> Iterator[str]:
        """The lines, with a comment where another module begins."""
        place = ""
        for around, run in itertools.groupby(nodes, _contexts):
            members = list(run)
            contexts = self._needed(around, members)
            yield from _with_lines(contexts)
            for node in members:
                statement = self._statement(node, INDENT + 4 * len(contexts))
                if statement is None:
                    continue
                here = self._place(node)
                if here != place:
                    yield from self._heading(here, node, INDENT + 4 * len(contexts), members[0])
                place = here
                yield statement

    def _heading(self, place: str, node: fx.Node, indent: int, first: fx.Node) -> Iterator[str]:
        """What stands above the first line of another module: a free line, and its name."""
        opens = node is first and indent > INDENT  # the line above opens a `with`
        if self._position[node] and not opens:
            yield ""
        if place:
            yield f"{' ' * indent}# {place}"

    def _statement(self, node: fx.Node, indent: int) -> str | None:
        """One line; None where none is needed."""
        if node.target is operator.getitem and node in self._names:
            return None  # unpacked already
        text = expression(node, self.name, deferring=node in self._deferring)
        target = _updated(node)
        if is_statement(node) or (target is not None and node not in self._given):
            if target is not None:
                self._names[node] = self._names[target]
            return wrap(text, indent)
        pieces = self._pieces(node)
        if pieces:
            return wrap(f"{self._unpacked(node, pieces)} = {text}", indent)
        self._names[node] = self._given.get(node) or self._choose(node)
        return remarked(wrap(f"{self._names[node]} = {text}", indent), _remark(node))

    def _pieces(self, node: fx.Node) -> dict[int, fx.Node]:
        """The nodes that take a tuple apart, if that is all that is done with it."""
        value = node.meta.get("val")
        users = list(node.users)
        if not isinstance(value, list | tuple) or self._last.get(node) == len(self._position):
            return {}
        if not all(u.target is operator.getitem and u in self._position for u in users):
            return {}
        if len(users) != len({str(u.args[1]) for u in users}) or len(users) < 2:
            return {}
        return {int(str(u.args[1])): u for u in users}

    def _unpacked(self, node: fx.Node, pieces: Mapping[int, fx.Node]) -> str:
        """`q, k, v`: the names of a tuple's parts."""
        value = node.meta["val"]
        names = []
        for index in range(len(value)):
            piece = pieces.get(index)
            if piece is not None:
                now = self._position[node]
                self._names[piece] = self._given.get(piece) or self._choose(piece, now, index)
            names.append("_" if piece is None else self._names[piece])
        return ", ".join(names)

    def _choose(self, node: fx.Node, now: int | None = None, index: int | None = None) -> str:
        """A name for a value that is not still needed; a part of a tuple is given its `index`."""
        position = self._position[node] if now is None else now
        operand = next(self._reads(node if index is None else node.all_input_nodes[0]), None)
        text = self._names.get(operand, "") if operand is not None else ""
        if is_conversion(node):
            text = text.removeprefix("self.")  # a tensor of the layer, held in another way
        candidates = list(wishes(node, text if text.isidentifier() else None, index))
        for candidate in candidates:
            if self._is_free(candidate, node, position):
                return candidate
        numbered = (f"{candidates[-1]}_{count}" for count in itertools.count(2))
        return next(name for name in numbered if self._is_free(name, node, position))

    def _is_free(self, name: str, node: fx.Node, position: int) -> bool:
        """Whether a name may be given to `node`: nothing that is read later has it."""
        if name in self._fixed:
            return False
        end = self._last.get(node, position)
        if any(
            given == name and self._position.get(owner, -1) < end
            for owner, given in self._given.items()
            if owner is not node
        ):
            return False
        return not any(
            self._last.get(other, -1) > position
            for other, text in self._names.items()
            if text == name
        )

    def _place(self, node: fx.Node) -> str:
        """The module of a node relative to the block; torch's own layers belong to theirs."""
        stack = steps(node)
        kinds = [str(kind) for _, kind in node.meta.get("nn_module_stack", {}).values()]
        if stack and kinds and "torch.nn.modules." in kinds[-1]:
            stack.pop()
        path = stack[-1].path if stack else ""
        if self._scope:
            path = f"{path}.".removeprefix(f"{self._scope}.").rstrip(".")
        return comment(path)

    def _needed(self, contexts: Sequence[Context], nodes: Sequence[fx.Node]) -> Sequence[Context]:
        """The contexts that matter: without gradients it does not matter who forbids them."""
        carried = self._graph.differentiable
        if any(operand.name in carried for node in nodes for operand in node.all_input_nodes):
            return contexts
        return [context for context in contexts if not str(context[0]).endswith("_grad")]


def _contexts(node: fx.Node) -> tuple[Context, ...]:
    """The `with` statements that a node stands under."""
    found: tuple[Context, ...] = node.meta.get("contexts", ())
    return found


def _remark(node: fx.Node) -> str:
    """What ranks tell each other in a conversion, in words."""
    said: Exchange | None = node.meta.get("exchange")
    if said is None:
        return ""
    there, back = (
        " and ".join(dict.fromkeys(action for action, _ in actions))
        for actions in (said.forward, said.backward)
    )
    if there.replace("-", "_") == getattr(node.target, "name", ""):
        there = f"{said.n} ranks"  # the name says the rest
    return ", ".join(part for part in (there, f"back: {back}" if back else "") if part)


def _updated(node: fx.Node) -> fx.Node | None:
    """The operand that a node updates in place and returns: `x.relu_()` is `x`."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    returns = node.target._schema.returns
    writes = [item.alias_info for item in returns if item.alias_info is not None]
    if len(returns) != 1 or not any(item.is_write for item in writes):
        return None
    return next(mutated_operands(node), None)


def _with_lines(contexts: Sequence[Context]) -> Iterator[str]:
    """The `with` statements that a run of nodes stands under."""
    for depth, (kind, *arguments) in enumerate(contexts):
        if kind == "own_draws":
            call = f"runtime.own_draws({', '.join(literal(a) for a in arguments if a is not None)})"
        elif kind == "autocast":
            device, dtype, _enabled = arguments
            call = f'torch.autocast("{identifier(str(device))}", dtype=torch.{identifier(dtype)})'
        else:
            call = f"torch.{kind}()"
        yield f"{' ' * (INDENT + 4 * depth)}with {call}:"
