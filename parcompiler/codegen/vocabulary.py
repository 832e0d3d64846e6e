"""The module of the vocabulary: tables with rows on every rank, and functions of the model.

The runtime has the passes; the model's own parts are methods here: the indices of lookups, the
labels, and functions of logits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from functools import cache, cached_property

from torch import fx

from parcompiler import runtime
from parcompiler.capture.gradients import requiring
from parcompiler.capture.templates import ATTRIBUTES, EMITTED, identifier, unique
from parcompiler.codegen.algorithm import algorithm
from parcompiler.codegen.attributes import names_table, tensor_line
from parcompiler.codegen.functions import method
from parcompiler.codegen.heading import module_text
from parcompiler.codegen.layout import table, wrap
from parcompiler.codegen.literals import construction, literal, string
from parcompiler.graph import Graph, Parameter
from parcompiler.lower.lowered import Lowered, Spread


def vocabulary_module(lowered: Lowered, device: str) -> str:
    """The text of `vocabulary.py`."""
    assert lowered.vocabulary is not None
    return VocabularyWriter(lowered, lowered.vocabulary, device).text()


def held_whole(graph: Graph, spread: Spread) -> tuple[str, ...]:
    """The buffers that indices and targets are computed from: every rank has all of them."""
    read = {node.name for small in _graphs(spread) for node in small.find_nodes(op="placeholder")}
    names = (item.name for item in graph.parameters if item.node in read)
    return tuple(name for name in names if name not in spread.tensors)


@cache
def reserved() -> frozenset[str]:
    """Further attributes of the class, names that tensors and methods must not have."""
    further = {"method", "size", "lookups", "head", "targets", "logits", "indices"}
    return ATTRIBUTES | further | frozenset(dir(runtime.Vocabulary(1, 0)))


class VocabularyWriter:
    """Writes the file of the layers of the vocabulary."""

    def __init__(self, lowered: Lowered, spread: Spread, device: str) -> None:
        self.lowered = lowered
        self.graph = lowered.graph
        self.spread = spread
        self.device = device
        names = (*spread.tensors, *held_whole(lowered.graph, spread))
        self.attributes = _distinct(names, reserved())

    def text(self) -> str:
        """The whole file."""
        nodes = [node for small in _graphs(self.spread) for node in small.nodes]
        calls = [node for node in nodes if node.op == "call_function"]
        return module_text(algorithm(self.lowered, self.spread), self._class(), calls, self.device)

    def _class(self) -> str:
        """The class, with methods where the model does something of its own."""
        named = {attribute: name for name, attribute in self.attributes.items()}
        sizes = [
            (string(self.attributes[name]), literal(size))
            for name, size in self.spread.tensors.items()
        ]
        lines = [
            "class Vocabulary(runtime.Vocabulary):",
            '    """Rows of the tables, and what the model does before and behind them."""',
            "",
            f"    method = {literal(self.spread.method)}",
            *names_table(named)[:-1],
            *table("size = {", sizes, "}", 4),
            *self._lookups(),
            *self._head(),
            "",
            *self._constructor(),
        ]
        for name, (comment, arguments, small) in self.methods.items():
            lines += ["", *self._method(name, comment, arguments, small)]
        return "\n".join(lines)

    @cached_property
    def methods(self) -> dict[str, tuple[str, Sequence[str], fx.Graph]]:
        """Name -> description, arguments and graph."""
        methods: dict[str, tuple[str, Sequence[str], fx.Graph]] = {}
        for value, name in self._indices.items():
            item = next(item for item in self.spread.lookups if item.value == value)
            comment = f"Which rows of the table {value} has."
            methods[name] = (comment, item.inputs, item.layer.indices)
        head = self.spread.head
        if head is not None and not self._is_plain(head.layer.targets, head.inputs):
            whose = " on all context ranks" if head.layer.loss.sizes else ""
            comment = f"The class of each row of {head.value}{whose}."
            methods["targets"] = (comment, head.inputs, head.layer.targets)
        if head is not None and head.layer.logits is not None:
            comment = "From x Wᵀ to what the loss takes, element by element."
            methods["logits"] = (comment, ("logits",), head.layer.logits)
        return methods

    @cached_property
    def _indices(self) -> dict[str, str]:
        """The methods that compute indices, by the value that is looked up."""
        values = [
            x.value for x in self.spread.lookups if not self._is_plain(x.layer.indices, x.inputs)
        ]
        if len(values) == 1:
            return {values[0]: "indices"}
        taken = {*reserved(), *self.attributes.values()}
        return _distinct(values, taken, "{}_indices")

    def _lookups(self) -> Iterator[str]:
        """The table of embeddings."""
        rows = []
        for item in self.spread.lookups:
            lookup = runtime.Lookup(
                weight=self.attributes[item.layer.weight],
                inputs=item.inputs,
                indices=self._indices.get(item.value, ""),
                padding_idx=item.layer.padding_idx,
            )
            rows.append((string(item.value), construction(lookup, "runtime.", keywords=True)))
        if rows:
            yield from table("lookups = {", rows, "}", 4)

    def _head(self) -> Iterator[str]:
        """The head and its loss."""
        if self.spread.head is None:
            return
        head, inputs = self.spread.head.layer, self.spread.head.inputs
        made = runtime.Head(
            x=self.spread.head.value,
            weight=self.attributes[head.weight],
            inputs=inputs,
            targets="targets" if "targets" in self.methods else "",
            bias=self.attributes.get(head.bias or "", ""),
            logits="logits" in self.methods,
            class_weight=self.attributes.get(head.class_weight or "", ""),
            **asdict(head.loss),
        )
        yield wrap(f"head = {construction(made, 'runtime.', keywords=True)}", 4)

    def _constructor(self) -> Iterator[str]:
        """`__init__` with a line per tensor."""
        yield "    def __init__(self, ranks: int, index: int) -> None:"
        yield "        super().__init__(ranks, index)"
        for name, attribute in self.attributes.items():
            item, size = self.graph.by_name[name], self.spread.tensors.get(name)
            made = None if size is None else _rows(item, size)
            yield tensor_line(attribute, item, made)

    def _method(
        self, name: str, remark: str, arguments: Sequence[str], small: fx.Graph
    ) -> list[str]:
        """A method that computes a small graph."""
        read = small.find_nodes(op="placeholder")
        operands = {node: self._operand(node, arguments) for node in read}
        floating = {node.name for node in read if node.meta["val"].is_floating_point()}
        parameters = "".join(f", {argument}: Tensor" for argument in arguments)
        carried = requiring(small, floating)
        return method(self.graph, small, f"def {name}(self{parameters})", remark, operands, carried)

    def _is_plain(self, small: fx.Graph, inputs: tuple[str, ...]) -> bool:
        """Whether a graph yields the one tensor of the batch that it reads."""
        (result,) = small.output_node().all_input_nodes
        return result.op == "placeholder" and inputs == (self._operand(result, inputs),)

    def _operand(self, node: fx.Node, arguments: Sequence[str]) -> str:
        """The expression for an input of a small graph: a buffer of this module or an argument."""
        if node.name in self.graph.by_node:
            return f"self.{self.attributes[self.graph.by_node[node.name].name]}"
        known = self.graph.placeholders.get(node.name)
        return arguments[0] if known is None else self.lowered.variables[known]


def _rows(item: Parameter, size: int) -> str:
    """The expression that makes this rank's rows of a tensor, still zeros."""
    sizes = ", ".join(map(literal, item.shape))
    dim = item.shape.index(size)
    sizes += f", dim={dim}" if dim else ""
    return f"runtime.rows({sizes}, ranks=ranks, dtype={literal(item.dtype)})"


def _distinct(names: Sequence[str], reserved: Collection[str], form: str = "{}") -> dict[str, str]:
    """An identifier for each name, none of them `reserved`."""
    taken = {*reserved, *EMITTED}
    return {name: unique(form.format(identifier(name)), taken) for name in names}


def _graphs(spread: Spread) -> Iterator[fx.Graph]:
    """The small graphs of indices, classes and logits."""
    yield from (item.layer.indices for item in spread.lookups)
    if spread.head is not None:
        yield spread.head.layer.targets
        if spread.head.layer.logits is not None:
            yield spread.head.layer.logits
