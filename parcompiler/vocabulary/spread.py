"""Rewrites a graph so that each layer of its vocabulary is one node, which belongs to no stage.

    captured  tokens ─► embedding ─► layers ─► linear ─► cap ─► view ─► cross_entropy ◄─ labels
    spread    tokens ─► lookup    ─► layers ─► view ─► head ◄─ labels

The rest of the graph, the trunk, is cut, costed, divided and lowered like any graph. Operations on
rows of the logits are now done on rows of the head's input `x`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from parcompiler.capture.blocks import cut, levels
from parcompiler.capture.clean import drop_dead
from parcompiler.capture.effects import effects_of, overload_name
from parcompiler.capture.rewriting import Rewriting, called, inserted
from parcompiler.errors import InputError, shown
from parcompiler.graph import (
    EmbeddingLookup,
    Graph,
    VocabularyHead,
    VocabularyLayers,
    dtype_of,
    shape_of,
)
from parcompiler.plan import VocabularyChoice
from parcompiler.vocabulary.find import HeadMatch, VocabularyMatch, find
from parcompiler.vocabulary.head_pattern import Chain
from parcompiler.vocabulary.nodes import extract


def spread(graph: Graph, choice: VocabularyChoice | Collection[str], ranks: int) -> Graph:
    """`graph` with the layers of these tables spread; a new graph, or `graph` if there are none.

    A choice may be the names of weights: all layers that read them are spread. Raises InputError,
    with the reason, for a layer that `ranks` ranks cannot share.
    """
    matched = find(graph, ranks)
    if isinstance(choice, VocabularyChoice):
        names = {*choice.lookups, *([choice.head] if choice.head else [])}
        _check(matched, set(choice.lookups) - set(matched.tables))
        _check(matched, {choice.head} - {matched.head.weight if matched.head else None, None})
    else:
        names = set(choice)
    lookups = tuple(item for item in matched.lookups if item.weight in names)
    head = matched.head if matched.head and matched.head.weight in names else None
    shared = {item.weight for item in lookups} | ({head.weight} if head else set())
    _check(matched, names - shared)
    if not lookups and not head:
        return graph
    key = "spread", frozenset(item.weight for item in lookups), head.weight if head else None
    return graph.once(key, lambda: _Spreading(graph, lookups, head).graph())


def lookup(weight: Tensor, *inputs: Tensor) -> Tensor:
    """The target of a node for a lookup of the batch's indices: no stage runs it."""
    raise NotImplementedError


def head(x: Tensor, weight: Tensor, *others: Tensor) -> Tensor:
    """The target of a node from the head's input to the loss: no stage runs it."""
    raise NotImplementedError


def _check(matched: VocabularyMatch, missing: Collection[str | None]) -> None:
    """Refuse names of tables that cannot be spread."""
    for name in sorted(filter(None, missing)):
        reason = matched.whole.get(str(name))
        message = (
            f"the vocabulary layer {shown(name, 200)} cannot be spread over the ranks "
            f"({reason or 'no lookup or head reads it'}): leave it out of the plan"
        )
        raise InputError(message)


class _Spreading(Rewriting):
    """The rewriting of one graph, node after node."""

    def __init__(
        self, graph: Graph, lookups: tuple[EmbeddingLookup, ...], head: HeadMatch | None
    ) -> None:
        super().__init__(graph)
        self.lookups = {item.node: item for item in lookups}
        self.head = head
        self.effects = effects_of(graph)

    def graph(self) -> Graph:
        """The spread graph."""
        lookups, head = [], None
        for node in self.whole.fx_graph.nodes:
            if node in self.lookups:
                lookups.append(self._lookup(self.lookups[node]))
            elif self.head and node is self.whole.loss:
                head = self._head(self.head)
            else:
                self.copy(node)
        drop_dead(self.made)
        self.made.lint()
        return self.rewritten(vocabulary=VocabularyLayers(tuple(lookups), head))

    def _lookup(self, item: EmbeddingLookup) -> EmbeddingLookup:
        """One node for an embedding, whose operands are the table and tensors of the batch."""
        args = self._tensor(item.weight), *self._inputs(item.indices)
        new = self.keep(item.node, self.made.call_function(lookup, args))
        # A received value is not updated in place, and goes to one stage only. Layers that are
        # apart may be on several stages: those read a clone made by that stage.
        if item.node in self.effects.writers or self._is_used_apart(item.node):
            name, clone, meta = f"{new.name}_own", torch.ops.aten.clone.default, dict(new.meta)
            self.nodes[item.node] = self.insert(name, clone, (new,), meta, carries=True)
        return dataclasses.replace(item, node=new)

    def _is_used_apart(self, node: fx.Node) -> bool:
        """Whether several of the finest blocks read a node's value."""
        if len(node.users) == 1:
            return False
        finest = cut(self.whole, levels(self.whole)[-1])
        home = {inner: b for b, block in enumerate(finest.blocks) for inner in block.nodes}
        return len({home[user] for user in node.users if user in home}) > 1

    def _head(self, item: HeadMatch) -> VocabularyHead:
        """One node for everything from the product to the loss, with row operations before it."""
        kept = {name: node for name, node in self.whole.kept.items() if node in item.chain.kept}
        targets = extract(self.whole, item.criterion.targets)
        x = self._rows(item.chain)
        _flatten_targets(targets)
        tensors = [item.weight, *filter(None, (item.bias, item.class_weight))]
        args = x, *map(self._tensor, tensors), *self._inputs(targets)
        new = self.keep(self.whole.loss, self.made.call_function(head, args))
        # Each rank multiplies by its rows when a prediction is requested.
        self.nodes |= dict.fromkeys(kept.values(), self.nodes[item.chain.product.x])
        return VocabularyHead(
            node=new,
            x=x,
            weight=item.weight,
            targets=targets,
            bias=item.bias,
            class_weight=item.class_weight,
            logits=logits_graph(item.chain, shape_of(x)[0]),
            loss=item.criterion.loss,
            outputs={n: (item.chain.kept[node], dtype_of(node)) for n, node in kept.items()},
        )

    def _rows(self, chain: Chain) -> fx.Node:
        """The head's input [n, h], contiguous: the operand of the product, with the row operations
        that the model applies to the logits."""
        product, dim = chain.product.node, chain.dim
        x = self.nodes[chain.product.x]
        x.meta = {**x.meta, "readers": (product,)}  # its source line continues with the product
        for row in chain.rows:
            args = fx.map_arg(row.args, self.nodes.__getitem__)
            x = self._called(x, row.target, args, row.node)
        shape = shape_of(x)
        if dim != len(shape) - 1:
            order = [*(other for other in range(len(shape)) if other != dim), dim]
            x = self._called(x, torch.ops.aten.permute.default, (order,), product)
        if len(shape) != 2:
            x = self._called(x, torch.ops.aten.reshape.default, ([-1, shape[dim]],), product)
        if not x.meta["val"].is_contiguous():
            x = self._called(x, torch.ops.aten.contiguous.default, (), product)
        return x

    def _called(self, x: fx.Node, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        """A new node of a row operation, with the place in the model of the node `like`."""
        meta = {**like.meta, "val": called(target, (x, *args))}
        name, carries = f"{target._opname}_of_rows", x.name in self.carrying
        return self.insert(name, target, (x, *args), meta, carries=carries)

    def _tensor(self, name: str) -> fx.Node:
        """The placeholder of a tensor of the model."""
        return self.nodes[self.whole.placeholders[self.whole.by_name[name].node]]

    def _inputs(self, computation: fx.Graph) -> list[fx.Node]:
        """The placeholders that a small graph reads."""
        names = {node.name for node in computation.find_nodes(op="placeholder")}
        return [copy for node, copy in self.nodes.items() if node.name in names]


def logits_graph(chain: Chain, rows: int) -> fx.Graph | None:
    """The functions between the head's product and its loss as a small graph of logits [n, V]:
    soft caps, scales and casts in order, none of them in place; None when there are none."""
    if not chain.functions:
        return None
    graph = fx.Graph()
    value = graph.placeholder("logits")
    product = chain.product
    value.meta["val"] = product.node.meta["val"].new_empty(rows, product.weight.shape[0])
    for node in chain.functions:
        value = _copied(graph, node, value)
    graph.output(value)
    return graph


def _copied(graph: fx.Graph, node: fx.Node, value: fx.Node) -> fx.Node:
    """One function of `value` instead of the operand that it has in the model."""
    target, name = node.target, overload_name(node)
    if name == "type_as":
        made = graph.call_function(torch.ops.aten.to.dtype, (value, dtype_of(node)))
    else:
        if name.endswith("_"):
            assert isinstance(target, torch._ops.OpOverload)
            packet = getattr(torch.ops.aten, name.removesuffix("_"))
            target = getattr(packet, target._overloadname)
        args = fx.map_arg((node.args, node.kwargs), lambda item: value)
        assert callable(target)
        made = graph.call_function(target, *args)
    made.meta = {k: v for k, v in node.meta.items() if k != "val"}
    made.meta["val"] = value.meta["val"].to(dtype_of(node))
    return made


def _flatten_targets(graph: fx.Graph) -> None:
    """Make a computation of targets return a vector."""
    output = graph.output_node()
    (result,) = output.all_input_nodes
    if len(shape_of(result)) == 1:
        return
    output.args = (inserted(output, torch.ops.aten.reshape.default, result, [-1], like=result),)
