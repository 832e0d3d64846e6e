"""The statements of a forward: one line per operation, with the model's own variable names."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from torch import fx

from parcompiler.capture.blocks import steps
from parcompiler.capture.clean import Context
from parcompiler.capture.effects import Effects
from parcompiler.capture.gradients import requiring
from parcompiler.capture.templates import identifier
from parcompiler.codegen.attributes import BlockAttributes
from parcompiler.codegen.layout import remarked, wrap
from parcompiler.codegen.literals import literal
from parcompiler.codegen.merge import merged
from parcompiler.codegen.operators import expression
from parcompiler.codegen.quoting import comment
from parcompiler.codegen.registry import home_of
from parcompiler.graph import Graph
from parcompiler.naming.variables import Variables
from parcompiler.spmd.runtime_call import NodeCollectives

INDENT = 8


class Body:
    """Writes nodes as statements, with names that `Variables` chooses.

    `operands` names what is there before; `fixed` are names that no variable may take; `deferring`
    are nodes that can leave the gradient of their weight for later. `attributes` have tensors under
    other names than `operands`, and modules that compute some nodes.
    """

    def __init__(
        self,
        graph: Graph,
        effects: Effects,
        operands: Mapping[fx.Node, str],
        fixed: Iterable[str] = (),
        scope: str = "",
        deferring: Collection[fx.Node] = (),
        attributes: BlockAttributes | None = None,
    ) -> None:
        self._graph = graph
        self._effects = effects
        self._operands = operands
        homes = {home_of(node) for node in graph.fx_graph.nodes if node.op == "call_function"}
        self._fixed = {*fixed, *(home.partition(".")[0] for home in homes)}
        self._scope = scope
        self._deferring = deferring
        tensors = attributes.operands if attributes else {}
        self._paths = {operands[node]: path for node, path in tensors.items()}
        self._modules = attributes.calls if attributes else {}
        self._counted = attributes.counted if attributes else set()
        self._variables = Variables((), {}, operands)

    def lines(self, nodes: Sequence[fx.Node], outputs: Mapping[fx.Node, str | None]) -> list[str]:
        """The statements; `outputs` live to the end, under a given name or one of their own."""
        same = merged(nodes, outputs, self._graph, self._effects)
        self._variables = Variables(nodes, outputs, self._operands, self._fixed, same)
        return list(self._statements(self._variables.written))

    def name(self, node: fx.Node) -> str:
        """The text that stands for a node's value."""
        name = self._variables.name(node)
        return self._paths.get(name, name)

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
        if self._variables.position[node] and not opens:
            yield ""
        if place:
            yield f"{' ' * indent}# {place}"

    def _statement(self, node: fx.Node, indent: int) -> str | None:
        """One line; None where none is needed."""
        names = self._variables.assign(node)
        if names is None or node in self._counted:
            return None
        if node in self._modules:
            module, argument = self._modules[node]
            text = f"{module}({self.name(argument)})"
        else:
            text = expression(node, self.name, deferring=node in self._deferring)
        if not names:
            return wrap(text, indent)
        line = wrap(f"{', '.join(names)} = {text}", indent)
        return line if len(names) > 1 else remarked(line, _remark(node))

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
        graph = self._graph
        recorded = graph.once("requiring", lambda: requiring(graph.fx_graph, graph.differentiable))
        if any(operand.name in recorded for node in nodes for operand in node.all_input_nodes):
            return contexts
        return [context for context in contexts if not str(context[0]).endswith("_grad")]


def _contexts(node: fx.Node) -> tuple[Context, ...]:
    """The `with` statements that a node stands under."""
    found: tuple[Context, ...] = node.meta.get("contexts", ())
    return found


def _remark(node: fx.Node) -> str:
    """What ranks tell each other in a conversion, in words."""
    said: NodeCollectives | None = node.meta.get("exchange")
    if said is None:
        return ""
    there, back = (
        " and ".join(dict.fromkeys(action for action, _ in actions))
        for actions in (said.forward, said.backward)
    )
    if there.replace("-", "_") == getattr(node.target, "name", ""):
        there = f"{said.n} ranks"  # the name says the rest
    return ", ".join(part for part in (there, f"back: {back}" if back else "") if part)


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
