"""The statements of a forward: one line per operation, with the model's own variable names."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import fx

from parcompiler.capture.blocks import steps
from parcompiler.capture.clean import Context
from parcompiler.capture.effects import Effects, is_random, mutated_operands
from parcompiler.capture.evaluation import BY_MODE
from parcompiler.capture.gradients import recorded_in
from parcompiler.capture.templates import identifier, unique
from parcompiler.codegen.attributes import BlockAttributes
from parcompiler.codegen.heading import home_of
from parcompiler.codegen.layout import remarked, wrap
from parcompiler.codegen.literals import literal
from parcompiler.codegen.operators import expression
from parcompiler.codegen.quoting import comment
from parcompiler.graph import Graph
from parcompiler.naming.variables import Variables
from parcompiler.spmd.runtime_call import NodeCollectives

INDENT = 8
NEUTRAL = {
    "add.Tensor": 0,
    "sub.Tensor": 0,
    "mul.Tensor": 1,
    "div.Tensor": 1,
}  # neutral operands


class Body:
    """Writes nodes as statements, with names that `Variables` chooses.

    `operands` names existing values; `fixed` are names that no variable may take. For a block,
    `attributes` has the paths of its tensors, and modules that compute some nodes.
    """

    def __init__(
        self,
        graph: Graph,
        effects: Effects,
        operands: Mapping[fx.Node, str],
        fixed: Iterable[str] = (),
        scope: str = "",
        attributes: BlockAttributes | None = None,
    ) -> None:
        self._graph = graph
        self._effects = effects
        self._operands = operands
        homes = {home_of(node) for node in graph.fx_graph.nodes if node.op == "call_function"}
        self._fixed = {*fixed, *(home.partition(".")[0] for home in homes)}
        self._scope = scope
        self._attributes = attributes
        paths = attributes.operands.items() if attributes else ()
        self._paths = {operands[node]: path for node, path in paths}
        self._variables = Variables((), {}, operands)
        self._conditions: Mapping[fx.Node, Context] = {}

    def lines(self, nodes: Sequence[fx.Node], outputs: Mapping[fx.Node, str | None]) -> list[str]:
        """The statements; `outputs` live to the end, under the given name if any."""
        same = merged(nodes, outputs, self._graph, self._effects)
        self._variables = Variables(nodes, outputs, self._operands, self._fixed, same)
        self._conditions = conditions(self._variables.written, outputs, same, self._effects)
        return list(self._statements(self._variables.written))

    def name(self, node: fx.Node) -> str:
        """The expression for a node's value."""
        name = self._variables.name(node)
        return self._paths.get(name, name)

    def _statements(self, nodes: Sequence[fx.Node]) -> Iterator[str]:
        """The lines, with a comment where another module begins."""
        place = ""
        for around, run in itertools.groupby(nodes, self._around):
            members = list(run)
            contexts = self._needed(around, members)
            indent = INDENT + 4 * len(contexts)
            opening = list(_openings(contexts))
            for node in members:
                statement = self._statement(node, indent)
                if statement is None:
                    continue
                opens, current = bool(opening), self._place(node)
                yield from opening
                opening = []
                if current != place:
                    yield from self._heading(current, node, indent, opens=opens)
                place = current
                yield statement

    def _around(self, node: fx.Node) -> tuple[Context, ...]:
        """The condition, if any, and the contexts that a node stands under."""
        condition, contexts = self._conditions.get(node), node.meta.get("contexts", ())
        return contexts if condition is None else (condition, *contexts)

    def _heading(self, place: str, node: fx.Node, indent: int, *, opens: bool) -> Iterator[str]:
        """The lines above the first line of another module: its name, and an empty one unless it
        opens an indented block."""
        if self._variables.position[node] and not opens:
            yield ""
        if place:
            yield f"{' ' * indent}# {place}"

    def _statement(self, node: fx.Node, indent: int) -> str | None:
        """One line; None where none is needed."""
        names = self._variables.assign(node)
        attributes = self._attributes
        if names is None or (attributes and node in attributes.counted):
            return None
        again = attributes is not None and node in attributes.again
        if attributes and node in attributes.calls:
            module, argument = attributes.calls[node]
            operand = self.name(argument)
            text = f"runtime.again({module}, {operand})" if again else f"{module}({operand})"
        elif again:
            text = self._again(node)
        else:
            deferring = attributes is not None and node in attributes.deferring
            text = expression(node, self.name, deferring=deferring)
        if not names:
            return wrap(text, indent)
        line = wrap(f"{', '.join(names)} = {text}", indent)
        return line if len(names) > 1 else remarked(line, _remark(node))

    def _again(self, node: fx.Node) -> str:
        """The call of an operator that runs again: through its name, or through a lambda."""
        operands = [self.name(operand) for operand in node.all_input_nodes]
        names = dict.fromkeys(operands)
        for text in names:
            names[text] = unique(text.rpartition(".")[2], {n for n in names.values() if n})
        inside = expression(node, lambda operand: str(names[self.name(operand)]))
        head, _, rest = inside.partition("(")
        if rest != f"{names[operands[0]]})" or not head.startswith(("F.", "torch.", "runtime.")):
            head = f"lambda {', '.join(map(str, names.values()))}: {inside}"
        return f"runtime.again({', '.join([head, *names])})"

    def _place(self, node: fx.Node) -> str:
        """The module of a node relative to the block; torch's own layers count as their parents."""
        stack = list(steps(node))
        kinds = [str(kind) for _, kind in node.meta.get("nn_module_stack", {}).values()]
        if stack and kinds and "torch.nn.modules." in kinds[-1]:
            stack.pop()
        path = stack[-1].path if stack else ""
        if self._scope:
            path = f"{path}.".removeprefix(f"{self._scope}.").rstrip(".")
        return comment(path)

    def _needed(self, contexts: Sequence[Context], nodes: Sequence[fx.Node]) -> Sequence[Context]:
        """The contexts, without `no_grad` and the like if no operand has a gradient."""
        recorded = recorded_in(self._graph)
        if any(operand.name in recorded for node in nodes for operand in node.all_input_nodes):
            return contexts
        return [context for context in contexts if not str(context[0]).endswith("_grad")]


def _remark(node: fx.Node) -> str:
    """The collectives of a conversion, forward and backward."""
    exchange: NodeCollectives | None = node.meta.get("exchange")
    if exchange is None:
        return ""
    forward, backward = (
        " and ".join(dict.fromkeys(action for action, _ in actions))
        for actions in (exchange.forward, exchange.backward)
    )
    if forward.replace("-", "_") == getattr(node.target, "name", ""):
        forward = f"{exchange.n} ranks"  # the function's name says the rest
    return ", ".join(part for part in (forward, f"back: {backward}" if backward else "") if part)


def _openings(contexts: Sequence[Context]) -> Iterator[str]:
    """The `if` and `with` statements that a run of nodes stands under."""
    for depth, (kind, *arguments) in enumerate(contexts):
        if kind == "if":
            yield f"{' ' * (INDENT + 4 * depth)}if {arguments[0]}:"
            continue
        if kind == "own_draws":
            dim, sizes, axis, zigzag = arguments
            texts = [literal(item) for item in (dim, sizes) if item is not None]
            texts += [f"axis={literal(axis)}"] if axis != "tensor" else []
            texts += ["zigzag=True"] if zigzag else []
            call = f"runtime.own_draws({', '.join(texts)})"
        elif kind == "autocast":
            device, dtype, enabled = arguments
            off = "" if enabled else ", enabled=False"
            where = identifier(str(device))
            call = f'torch.autocast("{where}", dtype=torch.{identifier(dtype)}{off})'
        else:
            call = f"torch.{kind}()"
        yield f"{' ' * (INDENT + 4 * depth)}with {call}:"


def conditions(
    nodes: Sequence[fx.Node],
    outputs: Collection[fx.Node],
    same: Mapping[fx.Node, fx.Node],
    effects: Effects,
) -> Mapping[fx.Node, Context]:
    """The nodes whose values only training or only evaluation uses, with the condition that they
    stand under. `same` maps nodes that are not written. Training draws what the model draws, used
    or not."""
    only: dict[fx.Node, Context] = {}
    if not any(node.target is BY_MODE for node in nodes):
        return only
    for condition, chosen in ("not self.training", 0), ("self.training", -1):
        drawn = filter(is_random, nodes) if chosen == 0 else ()
        needed, inside = {*outputs, *drawn}, set(nodes)
        memory = {effects.root(node) for node in outputs}
        for node in reversed(nodes):
            roots = {effects.root(operand) for operand in mutated_operands(node)}
            if node not in needed and (not roots or roots <= inside - memory):
                only[node] = "if", condition
                continue
            read = node.all_input_nodes
            read = [read[chosen]] if node.target is BY_MODE else read
            needed.update(items := [same.get(item, item) for item in read])
            memory.update(map(effects.root, items))
    return only


def merged(
    nodes: Sequence[fx.Node], kept: Collection[fx.Node], graph: Graph, effects: Effects
) -> Mapping[fx.Node, fx.Node]:
    """For each node that need not be written, the one with the same value; never one of `kept`.

    Masks and position ids are built by helpers that each start from the same `arange`. Only nodes
    without a gradient are merged, to keep the order in which gradients are added, and only if
    nothing updates their memory or that of their operands in place.
    """
    same: dict[fx.Node, fx.Node] = {}
    first: dict[object, fx.Node] = {}
    for node in nodes:
        if not _is_constant(node, graph, effects):
            continue
        operand = _unchanged(node)
        if operand is None:
            arguments = fx.map_arg((node.args, node.kwargs), lambda item: same.get(item, item))
            # Equal for nodes with equal values; fx nodes print their unique names.
            formula = str(node.target), arguments, node.meta.get("contexts", ())
            operand = first.setdefault(repr(formula), node)
        if operand is not node and node not in kept:
            same[node] = same.get(operand, operand)
    return same


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
