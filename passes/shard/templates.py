"""A graph folded along its templates: of all blocks of one template the first stands for all.

    blocks    embedding ─► layers.0 ─► layers.1 ─► … ─► layers.125 ─► head
    folded    Embedding ─► Layer ⟲ (125 ×) ─► Head                        Layer counts 126 times

Blocks of a template share all decisions, so that a programme over the folded graph is as large for
126 layers as for 2. Blocks of one template that the user pins differently are folded separately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from parcompiler.capture.blocks import Cut, cut, levels
from parcompiler.capture.effects import effects_of
from parcompiler.graph import Block, Graph, Parameter

MORE = 1.25  # a granularity may have this many times the fewest nodes


@dataclass(frozen=True, slots=True)
class BlockTemplate:
    """Blocks that share all decisions; the first stands for all."""

    name: str
    blocks: tuple[Block, ...]

    @property
    def first(self) -> Block:
        """The block that stands for all."""
        return self.blocks[0]


@dataclass(frozen=True, slots=True, eq=False)  # a group is itself: it is a key of many dicts
class TensorGroup:
    """Tensors in the same place of the blocks of a template, which have one placement.

    Places that read the same tensor (tied weights) are one group. `node` is the placeholder of the
    first tensor.
    """

    items: tuple[Parameter, ...]
    node: fx.Node
    outside: bool  # read by the prologue as well


@dataclass(frozen=True)
class FoldedGraph:
    """The templates of a graph at a granularity, and how values flow between them."""

    graph: Graph
    level: int
    templates: tuple[BlockTemplate, ...]
    prologue: tuple[fx.Node, ...]

    @cached_property
    def stands_for(self) -> Mapping[fx.Node, fx.Node]:
        """For each node of a block, the corresponding node of the first block of its template."""
        return {
            node: first
            for template in self.templates
            for block in template.blocks
            for node, first in zip(block.nodes, template.first.nodes, strict=True)
        }

    @cached_property
    def home(self) -> Mapping[fx.Node, int]:
        """The number of the template of each node of a first block."""
        return {
            node: number
            for number, template in enumerate(self.templates)
            for node in template.first.nodes
        }

    def sources(self, number: int, place: int) -> Counter[fx.Node | None]:
        """Sources of an input of a template's blocks: nodes of first blocks and shared nodes, with
        the number of blocks that read them. None stands for the prologue and the batch."""
        known = {**self.stands_for, **{node: node for node in self.shared}}
        return Counter(known.get(block.inputs[place]) for block in self.templates[number].blocks)

    @cached_property
    def shared(self) -> frozenset[fx.Node]:
        """The vocabulary's nodes, which are in no block: their results are whole (`I`)."""
        return shared_nodes(self.graph)

    @cached_property
    def tensor_groups(self) -> tuple[TensorGroup, ...]:
        """The parameters and buffers that blocks read, grouped where they have one placement."""
        return tuple(dict.fromkeys(self.group_of.values()))

    @cached_property
    def group_of(self) -> Mapping[str, TensorGroup]:
        """The group of each parameter and buffer that a block reads, by its name."""
        return _tensor_groups(self)

    @cached_property
    def fixed(self) -> frozenset[fx.Node]:
        """The nodes whose values may not be converted, because a later node updates their memory
        in place."""
        effects = effects_of(self.graph)
        position = {node: place for place, node in enumerate(self.graph.fx_graph.nodes)}
        last = {root: max(map(position.__getitem__, w)) for root, w in effects.writers.items()}
        return frozenset(
            self.stands_for.get(node, node)
            for node in position
            if position[node] < last.get(effects.root(node), -1)
        )


def fold(graph: Graph, pin: Callable[[str], str] = lambda name: "", level: int = 0) -> FoldedGraph:
    """Fold a graph at `level`, or (0) at the coarsest level where templates have few nodes.

    `pin` is the user's pin of a parameter, as text: blocks with different pins are different
    templates.
    """
    tried = {at: cut(graph, at) for at in ((level,) if level else levels(graph))}
    fewest = min(map(_distinct, tried.values()))
    best = next(at for at in sorted(tried) if _distinct(tried[at]) <= MORE * fewest)
    groups: dict[tuple[str, ...], list[Block]] = {}
    for block in tried[best].blocks:
        pins = [pin(binding.name) for binding in block.tensors]
        groups.setdefault((block.template, *(pins if any(pins) else ())), []).append(block)
    templates = (BlockTemplate(name, tuple(blocks)) for (name, *_), blocks in groups.items())
    return FoldedGraph(graph, best, tuple(templates), tried[best].prologue)


def shared_nodes(graph: Graph) -> frozenset[fx.Node]:
    """The vocabulary's nodes, which all ranks share and which belong to no template."""
    return frozenset(graph.vocabulary.nodes if graph.vocabulary else ())


def end_of(graph: Graph) -> fx.Node:
    """The value that must leave the blocks whole: the loss, or the input of a shared head."""
    head = graph.vocabulary.head if graph.vocabulary else None
    return graph.loss if head is None else head.x


def _distinct(parts: Cut) -> int:
    """The number of nodes in the distinct templates of a cut."""
    return sum({block.template: len(block.nodes) for block in parts.blocks}.values())


def _tensor_groups(folded: FoldedGraph) -> dict[str, TensorGroup]:
    """By name, groups of tensors that stand in one place of a template or are read in several."""
    leader: dict[str, str] = {}

    def find(name: str) -> str:
        while leader.setdefault(name, name) != name:
            name = leader[name]
        return name

    for template in folded.templates:
        for block in template.blocks:
            for binding, first in zip(block.tensors, template.first.tensors, strict=True):
                root = find(binding.name)
                leader[root] = find(first.name)
    members: dict[str, list[Parameter]] = {}
    for name in sorted(leader):
        members.setdefault(find(name), []).append(folded.graph.by_name[name])
    nodes = folded.graph.placeholders
    read = {operand for node in folded.prologue for operand in node.all_input_nodes}
    groups = {}
    for items in members.values():
        outside = any(nodes[item.node] in read for item in items)
        group = TensorGroup(tuple(items), nodes[items[0].node], outside)
        groups.update({item.name: group for item in items})
    return groups
