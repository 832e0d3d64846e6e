"""Which strategies are open to each node, and which nodes are decided together.

Nodes that only rename memory (views, items of several results) follow who makes the value, where
nothing is lost by that: the value has no other reader, they take each of its types, and so has
their result. All others decide for themselves; what they read may be converted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from parcompiler.capture.effects import mutated_operands
from parcompiler.passes.shard.fold import Fold
from parcompiler.passes.shard.price import Prices, Work
from parcompiler.spmd import Placement, Strategy, strategies
from parcompiler.spmd.call import OperatorCall, Shape, read
from parcompiler.spmd.segments import segmentations

LOOKUPS = frozenset({"embedding", "embedding_bag"})
LINE = 128  # bytes that an accelerator's cache fetches at once


@dataclass(frozen=True)
class Site:
    """A node that stands for others: its call, what it does, and what is open to it."""

    node: fx.Node
    call: OperatorCall
    work: Work
    open: tuple[Strategy, ...]


@dataclass(frozen=True)
class Party:
    """Nodes that are decided together; `choices` are their strategies, in the order of `sites`."""

    sites: tuple[Site, ...]
    choices: tuple[tuple[Strategy, ...], ...]

    @property
    def name(self) -> str:
        """That of its first node."""
        return self.sites[0].node.name

    def types(self, node: fx.Node, result: int) -> tuple[Placement, ...]:
        """The type of a result of one of its nodes under each choice."""
        place = self._place(node)
        return tuple(choice[place].outputs[result] for choice in self.choices)

    def needs(self, node: fx.Node, operand: int) -> tuple[Placement, ...]:
        """The type that one of its nodes needs of an operand under each choice."""
        place = self._place(node)
        return tuple(choice[place].inputs[operand] for choice in self.choices)

    def _place(self, node: fx.Node) -> int:
        return next(place for place, site in enumerate(self.sites) if site.node is node)


@dataclass(frozen=True)
class Candidates:
    """The sites and parties of a folded graph; `wish` says what the user demands of a parameter."""

    folded: Fold
    prices: Prices
    wish: Callable[[str], str] = lambda name: ""
    _sites: dict[fx.Node, Site] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def sites(self) -> Mapping[fx.Node, Site]:
        """Every node that stands for others, in order."""
        return {site.node: site for site in self._all()}

    @cached_property
    def parties(self) -> tuple[Party, ...]:
        """The nodes that are decided together."""
        found: dict[fx.Node, list[Site]] = {}
        leader: dict[fx.Node, fx.Node] = {}
        for node, site in self.sites.items():
            followed = self._followed(site)
            leader[node] = node if followed is None else leader[followed]
            found.setdefault(leader[node], []).append(site)
        return tuple(Party(tuple(sites), tuple(_together(sites))) for sites in found.values())

    def _all(self) -> Iterator[Site]:
        """The strategies of each node that stands for others."""
        differentiable, n = self.folded.graph.differentiable, self.prices.n
        classes = set(vocabularies(self.folded))
        for template in self.folded.templates:
            segments = segmentations(template.first.nodes)
            for node in template.first.nodes:
                call = read(node, differentiable)
                found = strategies(node, n, differentiable=differentiable, segments=segments)
                allowed = [s for s in found if is_offered(call, s, n, classes)]
                allowed = [s for s in allowed if not self._is_narrow(call, s)]
                yield Site(node, call, self._work(node, call), tuple(self._sound(call, allowed)))

    def _is_narrow(self, call: OperatorCall, strategy: Strategy) -> bool:
        """Whether ranks look up pieces of rows that are shorter than what memory yields at once.

        Each would read as much as for whole rows. The user may demand it of a parameter.
        """
        if call.base not in LOOKUPS or strategy.inputs[0].kind != "S":
            return False
        table = call.operands[0]
        item = self.folded.graph.by_node.get(table.node.name)
        if item is None or self.wish(item.name) or strategy.inputs[0].dim == 0:
            return False
        return table.shape[1] * table.value.itemsize < self.prices.n * LINE

    def _work(self, node: fx.Node, call: OperatorCall) -> Work:
        if call.is_item:
            return Work((), (), frozenset(), keeps_result=False, inner=0)
        return self.prices.work(node)

    def _sound(self, call: OperatorCall, found: Sequence[Strategy]) -> Iterator[Strategy]:
        """Without strategies under which an update in place would reach a copy.

        What the prologue and the batch yield is whole (`R`), and may be updated as such only.
        """
        updated = set(mutated_operands(call.node))
        known = self.folded.graph
        for strategy in found:
            pairs = zip(call.operands, strategy.inputs, strict=True)
            if all(
                placement.is_whole
                or operand.node not in self.folded.fixed | updated
                or operand.node in self.folded.stands_for
                or operand.node.name in known.by_node
                for operand, placement in pairs
            ):
                yield strategy

    def _followed(self, site: Site) -> fx.Node | None:
        """The node that a site follows."""
        call, home = site.call, self.folded.home
        if len(call.operands) != 1 or home.get(call.operands[0].node) != home[site.node]:
            return None
        producer = call.operands[0].node
        if call.is_item:
            return producer
        maker = self.sites[producer]
        if not site.work.is_free or len(call.results) != 1 or len(maker.call.results) != 1:
            return None
        alone = len(producer.users) == 1 and len(site.node.users) == 1
        if not alone or producer in self.folded.fixed or site.node in self.folded.fixed:
            return None
        given = {strategy.outputs[0] for strategy in maker.open}
        taken = [strategy.inputs[0] for strategy in site.open]
        kind = all(s.inputs[0].kind == s.outputs[0].kind for s in site.open)
        return producer if kind and all(taken.count(t) == 1 for t in given) else None


def _together(sites: Sequence[Site]) -> Iterator[tuple[Strategy, ...]]:
    """The choices of sites of which each, but the first, follows one before it."""
    number = {site.node: place for place, site in enumerate(sites)}

    def extended(chosen: tuple[Strategy, ...]) -> Iterator[tuple[Strategy, ...]]:
        if len(chosen) == len(sites):
            yield chosen
            return
        site = sites[len(chosen)]
        producer = chosen[number[site.call.operands[0].node]]
        given = producer.outputs[item_of(site.call)]
        fitting = [strategy for strategy in site.open if strategy.inputs == (given,)]
        for strategy in fitting[:1]:
            yield from extended((*chosen, strategy))

    return itertools.chain.from_iterable(extended((strategy,)) for strategy in sites[0].open)


def item_of(call: OperatorCall) -> int:
    """Which of the tensors of a node with several a call takes; 0 for other calls.

    >>> from parcompiler.spmd.simulate import example
    >>> import torch
    >>> item_of(example(torch.ops.aten.relu.default, torch.ones(2)))
    0
    """
    if not call.is_item:
        return 0
    of, index = call.node.args
    assert isinstance(of, fx.Node)
    assert isinstance(index, int)
    before = of.meta["val"][: index % len(of.meta["val"])]
    return sum(1 for value in before if hasattr(value, "dtype"))


def vocabularies(folded: Fold) -> Iterator[int]:
    """The numbers of classes of the losses."""
    for template in folded.templates:
        for node in template.first.nodes:
            if getattr(node.target, "_opname", "") == "cross_entropy_loss":
                yield read(node).shapes[0][-1]


def is_offered(call: OperatorCall, strategy: Strategy, n: int, classes: Collection[int]) -> bool:
    """Whether pieces are of one size, but for those of a vocabulary."""
    if strategy.special.startswith("vocabulary"):
        return True
    shapes: list[Shape] = [*call.shapes, *call.result_shapes]
    types = [*strategy.inputs, *strategy.outputs]
    return all(
        placement.kind != "S"
        or shape[placement.dim] in classes
        or all(part % n == 0 for part in placement.segments or (shape[placement.dim],))
        for shape, placement in zip(shapes, types, strict=True)
    )
