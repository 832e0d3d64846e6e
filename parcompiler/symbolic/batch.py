"""A captured graph for micro-batches of other rows, whole: every pass may read it.

captured graph, b = 2
    │  Resizer           how each number of the first block of each template is read
    ▼
Batched.at(4)            a copy of all nodes, with the numbers and values of four rows

Nothing is captured for that, and so it is what a capture at these rows is expected to be: a model
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
from parcompiler.symbolic.search import settled
from parcompiler.symbolic.sizes import Size, sizes_of
from parcompiler.symbolic.values import meta_at, number_at, shapes_of


class Batched:
    """Makes the graph of a problem for other rows. `again` captures its model at other sizes.

    Raises Unfit where the inputs share no rows, or the graph cannot be read at others.
    """

    def __init__(self, problem: Problem, again: Again | None = None) -> None:
        self.problem, self.again = problem, again
        self.size = batch_of(problem.graph)

    @cached_property
    def _resizer(self) -> Resizer:
        return settled(self.problem, self.problem.priced(1), (self.size,), self.again)

    def at(self, rows: int) -> Graph:
        """The graph for so many rows. Raises Unfit."""
        if rows == self.size.now:
            return self.problem.graph
        return self._copy(self._resizer.at({self.size.letter: rows}))

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
        sample = sample_at(graph, (self.size,), run.sizes)
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
