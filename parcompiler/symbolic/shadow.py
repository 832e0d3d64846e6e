"""A problem at other sizes as the passes see it: its blocks with other costs and other values.

The nodes are copies of those that were captured. What is between blocks has the shape that it would
have; what is inside of them is not looked at any more, for its costs are known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import fx

from parcompiler.capture.blocks import Cut
from parcompiler.capture.clean import keep_names
from parcompiler.cost import BlockCost
from parcompiler.graph import Block, Graph, Vocabulary
from parcompiler.mesh import Mesh
from parcompiler.plan import TemplateTime
from parcompiler.problem import Priced, Problem
from parcompiler.symbolic.search import ClosedForms
from parcompiler.symbolic.sizes import Sizes
from parcompiler.symbolic.values import with_shape
from parcompiler.times import modelled, modelled_on


class Shadow:
    """Makes problems at other sizes from one problem and the closed forms of its blocks."""

    def __init__(self, problem: Problem, priced: Priced, closed: ClosedForms, level: int) -> None:
        self.problem, self.priced, self.closed, self.level = problem, priced, closed, level
        made, self.copies = fx.Graph(), dict[fx.Node, fx.Node]()
        made.output(made.graph_copy(problem.graph.fx_graph, self.copies))
        keep_names(self.copies)
        for node, copy in self.copies.items():
            copy.meta = dict(node.meta)
        self.graph = self._graph(problem.graph, made)
        cut = priced.cut
        blocks = tuple(map(self._block, cut.blocks))
        self.cut = Cut(blocks, tuple(self.copies[node] for node in cut.prologue))
        like = closed.resizer.like
        self.between = {
            node: closed.shapes[like.get(node, node)]
            for node in self.copies
            if like.get(node, node) in closed.shapes
        }

    def at(self, sizes: Sizes, problem: Problem, costs: Mapping[str, BlockCost]) -> Problem:
        """The problem at these sizes, where blocks of each template cost `costs`, with the mesh and
        options of another.

        The one that was made before has the same nodes: it is of no use after that.
        """
        for node, shape in self.between.items():
            whole = [int(size) for size in shape.at(sizes)]
            value = node.meta["val"]
            self.copies[node].meta["val"] = with_shape(value, tuple(whole))
        own = [costs[block.template] for block in self.cut.blocks]
        sent = tuple(self.copies[node] for node in self.priced.sent)
        priced = Priced.timed(self.cut, own, sent, self._times(problem.mesh, costs))
        return dataclasses.replace(
            problem,
            graph=self.graph,
            bench=None,  # what was measured is of the sizes of the capture
            _priced={self.level: priced},
            _recomputing={},
            local={},
        )

    def _times(self, mesh: Mesh, costs: Mapping[str, BlockCost]) -> list[dict[str, TemplateTime]]:
        """What each template takes: by the figures of each device; where it was measured, so many
        times its measured seconds as the figures say."""
        found = modelled_on(mesh, costs)
        for name in costs if self.problem.times else ():  # devices are of one kind then
            measured = self.problem.times.get((self.level, name))
            if measured is not None:
                pairs = zip(self.priced.cut.blocks, self.priced.costs, strict=True)
                like = next(known for block, known in pairs if block.template == name)
                before = modelled(name, like, self.problem.device)
                found[0][name] = scaled(measured, before, found[0][name])
        return found

    def _graph(self, graph: Graph, made: fx.Graph) -> Graph:
        copies = self.copies
        return dataclasses.replace(
            graph,
            fx_graph=made,
            loss=copies[graph.loss],
            vocabulary=_vocabulary(graph.vocabulary, copies),
        )

    def _block(self, block: Block) -> Block:
        nodes, inputs, outputs = (
            tuple(self.copies[node] for node in part)
            for part in (block.nodes, block.inputs, block.outputs)
        )
        return dataclasses.replace(block, nodes=nodes, inputs=inputs, outputs=outputs)


def _vocabulary(spread: Vocabulary | None, copies: Mapping[fx.Node, fx.Node]) -> Vocabulary | None:
    """The layers of the vocabulary with the nodes of the copy."""
    if spread is None:
        return None
    lookups = tuple(dataclasses.replace(item, node=copies[item.node]) for item in spread.lookups)
    head = spread.head
    if head is not None:
        head = dataclasses.replace(head, node=copies[head.node], x=copies[head.x])
    return Vocabulary(lookups, head)


def scaled(measured: TemplateTime, before: TemplateTime, after: TemplateTime) -> TemplateTime:
    """Measured seconds at other sizes, by the modelled ones at those of the measurement and there.

    >>> one, two = TemplateTime("Layer", 1.0, 2.0, 0.5), TemplateTime("Layer", 2.0, 6.0, 1.0)
    >>> scaled(TemplateTime("Layer", 3.0, 3.0, 1.0), one, two)
    TemplateTime(template='Layer', forward=6.0, backward=9.0, weight=2.0)
    """

    def grown(name: str) -> float:
        known, old, new = (getattr(item, name) for item in (measured, before, after))
        return float(known * (new / old) if old else known)

    return dataclasses.replace(
        measured, forward=grown("forward"), backward=grown("backward"), weight=grown("weight")
    )
