"""The strategies of each node that the programme may choose, and the nodes decided together.

Nodes that only rename memory (views, items of several results) follow the node that makes the
value, where nothing is lost by that: they are the only reader of the value, their result has one
reader, and they have one strategy for each type of the value. All other nodes are decided
separately, and the values that they read may be converted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from parcompiler.capture.effects import mutated_operands
from parcompiler.passes.shard.node_costs import NodeWork, ShardCosts
from parcompiler.passes.shard.templates import FoldedGraph
from parcompiler.spmd import Placement, Strategy, strategies
from parcompiler.spmd.call import NodeCall, Shape, read
from parcompiler.spmd.segments import segmentations
from parcompiler.spmd.sorting import rows_of

_NO_WORK = NodeWork((), (), frozenset(), saves_result=False, saved_besides=0)


@dataclass(frozen=True)
class NodeChoices:
    """A node of the first block of a template: its call, its work, and its open strategies."""

    node: fx.Node
    call: NodeCall
    work: NodeWork
    strategies: tuple[Strategy, ...]


@dataclass(frozen=True)
class NodeGroup:
    """Nodes that are decided together; a choice is a strategy of each, in order."""

    members: tuple[NodeChoices, ...]
    choices: tuple[tuple[Strategy, ...], ...]

    @property
    def name(self) -> str:
        """The name of its first node."""
        return self.members[0].node.name

    def types(self, node: fx.Node, result: int) -> tuple[Placement, ...]:
        """The type of a result of one of its nodes under each choice."""
        place = self._place(node)
        return tuple(choice[place].outputs[result] for choice in self.choices)

    def needs(self, node: fx.Node, operand: int) -> tuple[Placement, ...]:
        """The type that one of its nodes needs of an operand under each choice."""
        place = self._place(node)
        return tuple(choice[place].inputs[operand] for choice in self.choices)

    def _place(self, node: fx.Node) -> int:
        return next(place for place, member in enumerate(self.members) if member.node is node)


@dataclass(frozen=True, eq=False)
class Candidates:
    """The choices of the nodes of a folded graph."""

    folded: FoldedGraph
    costs: ShardCosts

    @cached_property
    def nodes(self) -> Mapping[fx.Node, NodeChoices]:
        """The choices of every node of the first blocks, in order."""
        return {choices.node: choices for choices in self._all()}

    @cached_property
    def groups(self) -> tuple[NodeGroup, ...]:
        """The nodes that are decided together."""
        members: dict[fx.Node, list[NodeChoices]] = {}
        leader: dict[fx.Node, fx.Node] = {}
        for node, member in self.nodes.items():
            followed = self._followed(member)
            leader[node] = node if followed is None else leader[followed]
            members.setdefault(leader[node], []).append(member)
        return tuple(NodeGroup(tuple(x), tuple(_together(x))) for x in members.values())

    def _all(self) -> Iterator[NodeChoices]:
        """The choices of each node of the first blocks."""
        graph, n = self.folded.graph, self.costs.n
        differentiable, rows = graph.differentiable, rows_of(graph, self.costs.axis)
        nodes = [node for template in self.folded.templates for node in template.first.nodes]
        losses = (x for x in nodes if getattr(x.target, "_opname", "") == "cross_entropy_loss")
        classes = {read(loss).shapes[0][-1] for loss in losses}
        for template in self.folded.templates:
            segments = segmentations(template.first.nodes, self.costs.axis)
            for node in template.first.nodes:
                call = read(node, differentiable)
                known = strategies(
                    node, n, differentiable=differentiable, segments=segments, rows=rows
                )
                updated = set(mutated_operands(node))
                offered = (x for x in known if self._is_offered(call, x, classes, updated))
                work = _NO_WORK if call.is_item else self.costs.work(node)
                yield NodeChoices(node, call, work, tuple(offered))

    def _is_offered(
        self, call: NodeCall, strategy: Strategy, classes: set[int], updated: set[fx.Node]
    ) -> bool:
        """Whether the programme may choose a strategy of a call.

        Pieces must have equal sizes, except those of a vocabulary. No update in place may reach a
        copy: values of the prologue and the batch are whole (`R`), and are updated only as such.
        """
        graph = self.folded.graph
        shapes: list[Shape] = [*call.shapes, *call.result_shapes]
        types = [*strategy.inputs, *strategy.outputs]
        if self.costs.axis == "context" and not self._leaves_samples(call, strategy):
            return False
        even = all(
            placement.kind != "S"
            or shape[placement.dim] in classes
            or all(
                part % self.costs.n == 0 for part in placement.segments or (shape[placement.dim],)
            )
            for shape, placement in zip(shapes, types, strict=True)
        )
        if not even and not strategy.special.startswith("vocabulary"):
            return False
        return all(
            placement.is_whole
            or operand.node not in self.folded.fixed | updated
            or operand.node in self.folded.stands_for
            or operand.node.name in graph.by_node
            for operand, placement in zip(call.operands, strategy.inputs, strict=True)
        )

    def _leaves_samples(self, call: NodeCall, strategy: Strategy) -> bool:
        """Whether a strategy for context ranks splits neither parameters nor the samples of a
        batch: tensor and data ranks split those."""
        shapes: list[Shape] = [*call.shapes, *call.result_shapes]
        types = [*strategy.inputs, *strategy.outputs]
        split = [
            (place, shape, placement)
            for place, (shape, placement) in enumerate(zip(shapes, types, strict=True))
            if placement.kind == "S"
        ]
        stored = [operand.node.name in self.folded.graph.by_node for operand in call.operands]
        return not any(place < len(stored) and stored[place] for place, _, _ in split) and not any(
            placement.dim == 0 and not placement.segments and shape[0] in self._samples
            for _, shape, placement in split
        )

    @cached_property
    def _samples(self) -> frozenset[int]:
        """Sizes of a first dimension that means samples, or the rows of several samples."""
        shapes = [spec.shape for spec in self.folded.graph.inputs if len(spec.shape) > 1]
        rows = {shape[0] * shape[1] for shape in shapes if shape[0] > 1}
        return frozenset({shape[0] for shape in shapes} | rows)

    def _followed(self, member: NodeChoices) -> fx.Node | None:
        """The node that a member follows, if any."""
        call, home = member.call, self.folded.home
        if len(call.operands) != 1 or home.get(call.operands[0].node) != home[member.node]:
            return None
        producer = call.operands[0].node
        if call.is_item:
            return producer
        maker = self.nodes[producer]
        if not member.work.is_free or len(call.results) != 1 or len(maker.call.results) != 1:
            return None
        alone = len(producer.users) == 1 and len(member.node.users) == 1
        if not alone or producer in self.folded.fixed or member.node in self.folded.fixed:
            return None
        made = {strategy.outputs[0] for strategy in maker.strategies}
        taken = [strategy.inputs[0] for strategy in member.strategies]
        kind = all(s.inputs[0].kind == s.outputs[0].kind for s in member.strategies)
        return producer if kind and all(taken.count(t) == 1 for t in made) else None


def _together(members: Sequence[NodeChoices]) -> Iterator[tuple[Strategy, ...]]:
    """The choices of a group: every member but the first follows an earlier one."""
    number = {member.node: place for place, member in enumerate(members)}
    for first in members[0].strategies:
        chosen = [first]
        for member in members[1:]:
            producer = chosen[number[member.call.operands[0].node]]
            made = producer.outputs[result_index(member.call)]
            following = next((s for s in member.strategies if s.inputs == (made,)), None)
            if following is None:
                break
            chosen.append(following)
        else:
            yield tuple(chosen)


def result_index(call: NodeCall) -> int:
    """The number of the tensor that an item call takes of several results; 0 for other calls.

    >>> from parcompiler.spmd.simulate import example
    >>> import torch
    >>> result_index(example(torch.ops.aten.relu.default, torch.ones(2)))
    0
    """
    if not call.is_item:
        return 0
    of, index = call.node.args
    assert isinstance(of, fx.Node)
    assert isinstance(index, int)
    before = of.meta["val"][: index % len(of.meta["val"])]
    return sum(1 for value in before if hasattr(value, "dtype"))
