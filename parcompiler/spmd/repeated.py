"""A rewriting that rewrites the first of several equal layers, and copies the result for the
others.

    whole     h.0: norm, linear, + │ h.1: norm, linear, + │ h.2: norm, linear, +
    made      norm, fan_out, …     │ norm, fan_out, …     │ copies of what h.1 became
                     (its input is of another type)

Rewriting a node takes three times as long as copying the result, and large models have a hundred
equal layers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import NamedTuple

import torch
from torch import fx

from parcompiler.capture.blocks import cut
from parcompiler.capture.effects import outside
from parcompiler.capture.rewriting import Rewriting, place
from parcompiler.graph import Block, Graph


class Origin(NamedTuple):
    """The node that a new node is named after, with a suffix if it replaces no node of the whole;
    then also the node whose module it is in, if that is another one."""

    node: fx.Node
    suffix: str = ""
    module: fx.Node | None = None


class RepeatedRewriting(Rewriting):
    """A rewriting that notes the origins of new nodes, and can repeat the result of a layer."""

    def __init__(self, whole: Graph) -> None:
        super().__init__(whole)
        self.origins: dict[fx.Node, Origin] = {}  # in the order of the new nodes

    def made_since(self, count: int) -> list[fx.Node]:
        """The new nodes after the first `count`."""
        return list(islice(self.origins, count, None))

    def repeat(
        self, made: Sequence[fx.Node], before: Sequence[fx.Node], nodes: Sequence[fx.Node]
    ) -> None:
        """Copy `made`, the new nodes of the layer `before`, as those of an equal layer `nodes`."""
        read = [*outside(before)], [*outside(nodes)]
        twin = dict(zip((*read[0], *before), (*read[1], *nodes), strict=True))
        copies = {self.nodes[a]: self.nodes[b] for a, b in zip(*read, strict=True)}
        for old in made:
            base, suffix, module = self.origins[old]
            node, carries = twin[base], old.name in self.carrying
            args, kwargs = fx.map_arg((old.args, old.kwargs), copies.__getitem__)
            new = self.made.create_node(old.op, old.target, args, kwargs, node.name)
            known, given = base.meta, node.meta
            if module is not None:
                known, given = place(module, base), place(twin[module], node)
            # Entries not from its origin follow from shapes and types.
            more = {key: value for key, value in old.meta.items() if known.get(key) is not value}
            new.meta.update(given, **more)
            copies[old] = self.name(new, node.name + suffix, carries=carries) if suffix else new
            if not suffix:
                self.keep(node, new)
        for a, b in zip(before, nodes, strict=True):
            self.nodes[b] = copies[self.nodes[a]]


def layers(graph: Graph, home: Mapping[fx.Node, int], apart: AbstractSet[fx.Node]) -> list[Block]:
    """The blocks that are whole layers by `home`, with nothing between their nodes and none of
    those `apart`."""
    nodes = [*home]
    number = {node: place for place, node in enumerate(nodes)}

    def is_whole(block: Block) -> bool:
        first, last = number[block.nodes[0]], number[block.nodes[-1]]
        ends = (first - 1, first), (last, last + 1)
        return (
            last - first + 1 == len(block.nodes)
            and not apart & {*block.nodes}
            and all(home[nodes[i]] != home[nodes[j]] for i, j in ends if 0 <= i and j < len(nodes))
        )

    return [block for block in cut(graph, 1).blocks if is_whole(block)]


def form(values: Iterable[fx.Node]) -> tuple[Hashable, ...] | None:
    """Shapes, orders in memory and dtypes of values; None where one is no tensor of known size."""
    found = []
    for node in values:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in value.shape):
            return None
        found.append((tuple(value.shape), value.stride(), value.dtype))
    return tuple(found)
