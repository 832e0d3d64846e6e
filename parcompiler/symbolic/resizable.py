"""A captured graph at other sizes, whole: every pass may read it.

captured graph, b = 2
    │  Resizer                       how each number of the first block of each template is read
    ▼
ResizableGraph.at({"b": 4})          a copy of all nodes, with the numbers and values of four rows

Nothing is captured for that, and so it is what a capture at these sizes is expected to be: a model
may ask in its Python how many rows there are, and only a capture runs that.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

from torch import fx

from parcompiler.capture.clean import keep_names
from parcompiler.graph import Graph, shape_of
from parcompiler.problem import Problem
from parcompiler.symbolic.again import sample_at
from parcompiler.symbolic.operators import with_numbers
from parcompiler.symbolic.questions import Again
from parcompiler.symbolic.reading import Unfit
from parcompiler.symbolic.resize import Resizer, Run
from parcompiler.symbolic.search import choices, settled
from parcompiler.symbolic.sizes import Size, Sizes, now, sizes_of
from parcompiler.symbolic.values import meta_at, number_at, shapes_of


class ResizableGraph:
    """Makes the graph of a problem at other numbers of some sizes, by their letters. `again`
    captures its model at other sizes."""

    def __init__(
        self, problem: Problem, sizes: tuple[Size, ...], again: Again | None = None
    ) -> None:
        self.problem, self.sizes, self.again = problem, sizes, again
        self._made: dict[tuple[int, ...], Graph] = {}

    @property
    def now(self) -> dict[str, int]:
        """The numbers of the capture."""
        return now(self.sizes)

    @cached_property
    def _resizer(self) -> Resizer:
        return settled(self.problem, self.problem.priced(1), self.sizes, self.again)

    def settle(self) -> None:
        """Find how the numbers of the graph are to be read. Raises Unfit."""
        assert self._resizer

    def at(self, sizes: Sizes) -> Graph:
        """The graph at these sizes. Raises Unfit where it cannot be read, or does not run."""
        if sizes == self.now:
            return self.problem.graph
        key = tuple(sizes.values())
        if key not in self._made:
            self._made[key] = self._copy(self._resizer.at(sizes))
        return self._made[key]

    def _copy(self, run: Run) -> Graph:
        """All nodes with the numbers and the values of a run."""
        graph, made, copies = self.problem.graph, fx.Graph(), dict[fx.Node, fx.Node]()
        for node in graph.fx_graph.nodes:
            if node.op == "call_function":
                copies[node] = self._node(node, run, made, copies)
            else:
                copies[node] = made.node_copy(node, copies.__getitem__)
                if node in run.values:
                    copies[node].meta = {**node.meta, "val": run.values[node]}
        keep_names(copies)
        named = {node.name: copy for node, copy in copies.items()}
        inputs = tuple(
            dataclasses.replace(item, shape=shape_of(named[item.node])) for item in graph.inputs
        )
        sample = sample_at(graph, self.sizes, run.sizes)
        return dataclasses.replace(
            graph, fx_graph=made, loss=copies[graph.loss], inputs=inputs, sample=sample
        )

    def _node(
        self, node: fx.Node, run: Run, made: fx.Graph, copies: dict[fx.Node, fx.Node]
    ) -> fx.Node:
        """One node with its numbers read as those of the first block of its template."""
        like = self._resizer.like.get(node, node)
        if like not in run.values:
            message = f"{node.name!r} belongs to no block"
            raise Unfit(message)
        operands = [(operand, copies[operand]) for operand in node.all_input_nodes]
        after = shapes_of(operands[0])[1] if operands else None
        chosen = self._resizer.chosen[like].items()
        numbers = {name: number_at(item, after, run.sizes) for name, item in chosen}
        args, kwargs = fx.map_arg(with_numbers(node, numbers), copies.__getitem__)
        copy = made.create_node(node.op, node.target, args, kwargs)
        copy.meta = {**meta_at(node, operands), "val": run.values[like]}
        return copy


def batch_of(graph: Graph) -> Size:
    """The rows of a micro-batch. Raises Unfit where the inputs share none."""
    found = next((size for size in sizes_of(graph) if size.letter == "b"), None)
    if found is None:
        message = "the inputs have no rows"
        raise Unfit(message)
    given = [item for item in graph.inputs if item.shape]
    other = [item for item in given if (item.node, 0) not in found.places]
    if other:
        message = f"the inputs share no rows ({other[0].key!r} has {other[0].shape[0]})"
        raise Unfit(message)
    return found


def resizable(problem: Problem, again: Again | None) -> tuple[ResizableGraph, dict[str, str]]:
    """The graph in as many sizes as can be read, and why the others, by their words, cannot."""
    known, reasons = sizes_of(problem.graph), dict[str, str]()
    for sizes in choices(known):
        found = ResizableGraph(problem, sizes, again)
        try:
            found.settle()
        except Unfit as unfit:
            reasons |= {size.word: str(unfit) for size in sizes}
        else:
            words = {size.word for size in sizes}
            return found, {word: why for word, why in reasons.items() if word not in words}
    message = "without sizes nothing changes"
    raise AssertionError(message)
