"""The statements of a forward: one line per operation, with the model's own variable names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from parcompiler.capture.blocks import steps
from parcompiler.capture.effects import mutated_operands, overload_name
from parcompiler.capture.templates import identifier
from parcompiler.codegen.layout import assign, wrap
from parcompiler.codegen.operators import expression, is_statement
from parcompiler.lower.names import assigned_name

INDENT = 8


class Body:
    """Writes nodes as statements; a name is free again once its value is no longer needed."""

    def __init__(
        self, operands: Mapping[fx.Node, str], reserved: Iterable[str] = (), scope: str = ""
    ) -> None:
        self._names = dict(operands)
        self._reserved = {"self", "torch", "F", "DEVICE", *reserved}
        self._scope = scope

    def lines(
        self,
        nodes: Sequence[fx.Node],
        outputs: Mapping[fx.Node, str | None],
    ) -> list[str]:
        """The statements; `outputs` live to the end, under a given name or one of their own."""
        last = {operand: i for i, node in enumerate(nodes) for operand in node.all_input_nodes}
        last |= dict.fromkeys(outputs, len(nodes))
        written: list[str] = []
        place, contexts = "", ()
        for i, node in enumerate(nodes):
            if node.meta.get("contexts", ()) != contexts:
                contexts = node.meta.get("contexts", ())
                written += _with_lines(contexts)
                place = ""
            indent = INDENT + 4 * len(contexts)
            here = self._place(node)
            if here and here != place:
                written.append(" " * indent + f"# {here}")
            place = here or place
            written.append(self._statement(node, i, last, outputs.get(node), indent))
        return written

    def name(self, node: fx.Node) -> str:
        """The text that stands for a node's value."""
        return self._names[node]

    def _statement(
        self, node: fx.Node, i: int, last: Mapping[fx.Node, int], name: str | None, indent: int
    ) -> str:
        """One line."""
        text = expression(node, self.name)
        if is_statement(node):
            target = next(mutated_operands(node), None)
            if target is not None:
                self._names[node] = self._names[target]
            return wrap(text, indent)
        self._names[node] = name or self._choose(node, i, last)
        return assign(self._names[node], text, indent)

    def _choose(self, node: fx.Node, i: int, last: Mapping[fx.Node, int]) -> str:
        """A name for a value: the source's, or the operator's; not one that is still needed."""
        wish = assigned_name(node) or identifier(overload_name(node).strip("_") or "item")
        candidate, count = wish, 1
        while candidate in self._reserved or self._is_needed(candidate, i, last):
            count += 1
            candidate = f"{wish}_{count}"
        return candidate

    def _is_needed(self, name: str, i: int, last: Mapping[fx.Node, int]) -> bool:
        """Whether a name holds a value that a node after `i` reads."""
        return any(last.get(node, -1) > i for node, text in self._names.items() if text == name)

    def _place(self, node: fx.Node) -> str:
        """The module of a node relative to the block: what the comment above its lines says."""
        stack = steps(node)
        path = stack[-1].path if stack else ""
        if self._scope:
            path = path.removeprefix(self._scope).removeprefix(".")
        return comment(path)


def _with_lines(contexts: Iterable[tuple[object, ...]]) -> list[str]:
    """The `with` statements that a run of nodes stands under."""
    lines = []
    for depth, (kind, *arguments) in enumerate(contexts):
        if kind == "autocast":
            device, dtype, _enabled = arguments
            call = f"torch.autocast({device!r}, dtype=torch.{identifier(str(dtype))})"
        else:
            call = f"torch.{kind}()"
        lines.append(" " * (INDENT + 4 * depth) + f"with {call}:")
    return lines


def comment(text: str) -> str:
    """Any text as a harmless one-line comment."""
    return "".join(char if char.isprintable() else "?" for char in text)[:90]
