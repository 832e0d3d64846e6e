"""What the programme is told of a folded graph: groups, edges, conversions, bytes.

Conversions are made once in each block that needs them, for each type that it needs, as
`spmd.shard` makes them. A tensor of the model is held in pieces only where all who read it take the
same pieces, else whole (`I`, or `R` without a gradient).

Memory is that of all stages together, divided by their number: the parameters with gradient and
optimizer states, and what is kept of each micro-batch in flight (see `keeping`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from parcompiler.graph import Parameter
from parcompiler.passes.shard.candidates import Candidates, Party, Site, item_of
from parcompiler.passes.shard.fold import Fold, Holder, end_of
from parcompiler.passes.shard.keeping import Keeping, Memory, Shared, by_pair, nbytes_of
from parcompiler.passes.shard.pins import Pins
from parcompiler.passes.shard.price import WHOLE, Prices, share
from parcompiler.passes.shard.programme import (
    Charge,
    Edge,
    End,
    Group,
    Programme,
)
from parcompiler.spmd import I, Placement, R, Strategy
from parcompiler.spmd.conversions import conversion

Value = tuple[fx.Node, int]  # a result of a node that stands for others


@dataclass(frozen=True, slots=True)
class State:
    """One element of a tensor of the model: its bytes with gradient and optimizer states, and the
    seconds of its update, a micro-batch's part of them."""

    nbytes: float
    seconds: float = 0.0


@dataclass(frozen=True)
class Told:
    """The programme, and what its groups are: parties, then the tensors of the model."""

    programme: Programme
    parties: tuple[Party, ...]
    held: Mapping[Holder, tuple[Placement, ...]]


def tell(
    candidates: Candidates, pins: Pins, states: Mapping[str, State], memory: Memory | None
) -> Told:
    """The programme of a folded graph; `states` say what elements of its tensors cost, if known."""
    telling = _Telling(candidates, pins, states, memory)
    telling.edges_of_nodes()
    telling.loss()
    groups = tuple(telling.groups())
    charges = tuple(telling.charges())
    budget = None if memory is None else memory.nbytes * memory.stages
    programme = Programme(groups, tuple(telling.edges), charges, budget)
    return Told(programme, candidates.parties, telling.held)


class _Telling:
    """The programme while it is put together."""

    def __init__(
        self,
        candidates: Candidates,
        pins: Pins,
        states: Mapping[str, State],
        memory: Memory | None,
    ) -> None:
        self.candidates = candidates
        self.folded: Fold = candidates.folded
        self.prices: Prices = candidates.prices
        self.pins = pins
        self.states = states
        self.memory = memory
        self.edges: list[Edge] = []
        self.shared: dict[tuple[object, ...], Shared] = {}
        self.number = {
            site.node: number
            for number, party in enumerate(candidates.parties)
            for site in party.sites
        }
        first = len(candidates.parties)
        self.spot = {holder: first + k for k, holder in enumerate(self.folded.holders)}
        counts = {
            node: self.folded.templates[home].count for node, home in self.folded.home.items()
        }
        self.keeping = None
        if memory is not None:
            self.keeping = Keeping(candidates, memory, self.number, counts)

    # The tensors of the model

    @cached_property
    def held(self) -> dict[Holder, tuple[Placement, ...]]:
        """How each tensor may be held: whole, or in pieces that someone reads it in."""
        wanted: dict[Holder, dict[Placement, None]] = {h: {} for h in self.folded.holders}
        for site in self.candidates.sites.values():
            for place, operand in enumerate(site.call.operands):
                item = self.folded.graph.by_node.get(operand.node.name)
                if item is not None:
                    types = [s.inputs[place] for s in site.open]
                    split = [placement for placement in types if placement.kind == "S"]
                    wanted[self.folded.holder_of[item.name]].update(dict.fromkeys(split))
        found = {}
        for holder, pieces in wanted.items():
            whole = I if holder.node.name in self.folded.graph.differentiable else R
            open_to = (whole, *(() if holder.outside else sorted(pieces, key=str)))
            found[holder] = self.pins.allowed(holder, open_to)
        return found

    # Groups

    def groups(self) -> Iterator[Group]:
        """The parties, the tensors, and who reads the loss."""
        for party in self.candidates.parties:
            count = self._count(party)
            seconds = tuple(count * sum(map(self._seconds, party.sites, c)) for c in party.choices)
            nbytes = tuple(count * sum(map(self._inner, party.sites, c)) for c in party.choices)
            yield Group(party.name, seconds, nbytes)
        for holder, types in self.held.items():
            costs = [self._state(holder, placement) for placement in types]
            name = holder.items[0].name
            yield Group(name, tuple(c.seconds for c in costs), tuple(c.nbytes for c in costs))
        yield Group("loss", (0.0,), (0.0,))

    def _count(self, party: Party) -> int:
        return self.folded.templates[self.folded.home[party.sites[0].node]].count

    def _seconds(self, site: Site, strategy: Strategy) -> float:
        return self.prices.node(site.call, site.work, strategy)

    def _inner(self, site: Site, strategy: Strategy) -> float:
        """Bytes that a node keeps besides operands and results, of the micro-batches in flight."""
        if self.memory is None or self.memory.whole_blocks or not site.work.inner:
            return 0.0
        part = share(site.call.result_shapes[0], strategy.outputs[0], self.prices.n)
        return site.work.inner * part * self.memory.in_flight

    def _state(self, holder: Holder, placement: Placement) -> State:
        """What the tensors of a holder cost on a rank."""
        nbytes, seconds = 0.0, 0.0
        for item in holder.items:
            part = share(item.shape, placement, self.prices.n)
            each = self.states.get(item.name, State(0.0))
            nbytes += each.nbytes * item.numel * part
            seconds += each.seconds * item.numel * part + WHOLE * part
        return State(0.0 if self.memory is None else nbytes, seconds)

    # Edges

    def edges_of_nodes(self) -> None:
        """An edge for each value that a node reads, by each way that leads there."""
        for number, template in enumerate(self.folded.templates):
            inputs = {node: place for place, node in enumerate(template.first.inputs)}
            for node in template.first.nodes:
                site = self.candidates.sites[node]
                for place in range(len(site.call.operands)):
                    self._operand(number, inputs, site, place)

    def _operand(self, number: int, inputs: Mapping[fx.Node, int], site: Site, place: int) -> None:
        """The edges that lead to one operand of a node."""
        operand, template = site.call.operands[place], self.folded.templates[number]
        item = self.folded.graph.by_node.get(operand.node.name)
        if item is not None:
            self._tensor(number, item, site, place)
        elif operand.node in inputs:
            for source, count in self.folded.sources(number, inputs[operand.node]).items():
                if source in self.folded.shared:
                    self._received(source, site, place, count, number)
                elif source is not None:
                    self._edge((source, _result(site, place)), site, place, count, number)
        elif operand.node in self.number and self.number[operand.node] != self.number[site.node]:
            value = operand.node, _result(site, place)
            self._edge(value, site, place, template.count, number)
        elif self.keeping is not None and operand.node in site.work.keeps:
            if operand.node in self.number and not self.keeping.memory.whole_blocks:
                self.keeping.note_inside(operand.node)

    def _edge(self, value: Value, site: Site, place: int, count: int, number: int) -> None:
        """The edge of a value to one who reads it."""
        node, result = value
        maker = self.candidates.sites[node]
        party = self.candidates.parties[self.number[node]]
        nbytes = nbytes_of(maker, result)
        operand = site.call.operands[place]
        flows = site.call.gradients[place] and node.name in self.folded.graph.differentiable
        unknown = -1 in maker.call.result_shapes[result]
        fixed = unknown or node in self.folded.fixed or len(maker.call.results) > 1
        source = End(self.number[node], party.types(node, result))
        target = self._target(site, place)
        edge = self._add(f"{node.name}.{site.node.name}", source, target, flows, not fixed)
        key = node, result, operand.node, number, flows
        found = self.shared.setdefault(key, Shared(count, nbytes, flows))
        found.edges.append(edge)
        if self.keeping is not None and self._is_kept(node, site, operand.node, number, count):
            found.keepers.append(edge)
            self.keeping.note(node, edge)

    def _received(self, node: fx.Node, site: Site, place: int, count: int, number: int) -> None:
        """The edge of a looked-up value, which the vocabulary's ranks yield whole."""
        operand = site.call.operands[place]
        flows = site.call.gradients[place]
        target = self._target(site, place)
        name = f"{node.name}.{site.node.name}"
        convertible = node not in self.folded.fixed
        edge = self._add(name, self._whole(flows=True), target, flows, convertible)
        key = node, operand.node, number, flows
        size = math.prod(operand.shape) * operand.value.itemsize
        found = self.shared.setdefault(key, Shared(count, size, flows))
        found.edges.append(edge)
        if self.memory is not None and self._is_kept(node, site, operand.node, number, count):
            found.keepers.append(edge)

    def _whole(self, *, flows: bool) -> End:
        """What leaves the blocks, or comes from none of them: whole, with a whole gradient."""
        return End(len(self.candidates.parties) + len(self.spot), (I if flows else R,))

    def _is_kept(
        self, node: fx.Node, site: Site, operand: fx.Node, number: int, count: int
    ) -> bool:
        """Whether a value is kept by who reads it; by the whole block when it is recomputed."""
        if self.memory is None or not self.memory.whole_blocks:
            return operand in site.work.keeps
        template = self.folded.templates[number]
        return node not in template.first.nodes or count != template.count

    def _tensor(self, number: int, item: Parameter, site: Site, place: int) -> None:
        """The edge of a tensor of the model to one who reads it."""
        holder = self.folded.holder_of[item.name]
        types = self.held[holder]
        flows = site.call.gradients[place]
        source, target = End(self.spot[holder], types), self._target(site, place)
        name = f"{holder.items[0].name}.{site.node.name}"
        convertible = holder.node not in self.folded.fixed
        edge = self._add(name, source, target, flows, convertible, held=True)
        if any(self.pins.of(each.name) for each in holder.items):
            self._keep_whole(edge)
        key = item.name, number, flows
        count = self.folded.templates[number].count
        self.shared.setdefault(key, Shared(count, item.nbytes, flows)).edges.append(edge)

    def _keep_whole(self, edge: int) -> None:
        """What is pinned whole is read whole: pieces of it would be held as such."""
        before = self.edges[edge]
        whole = frozenset(p for p in before.allowed if not (p[0].is_whole and p[1].kind == "S"))
        self.edges[edge] = dataclasses.replace(before, allowed=whole)

    def loss(self) -> None:
        """The loss, or what a shared head reads, comes out whole, with a whole gradient."""
        node = self.folded.stands_for[end_of(self.folded.graph)]
        party = self.candidates.parties[self.number[node]]
        flows = node.name in self.folded.graph.differentiable
        end = self._whole(flows=flows)
        source = End(self.number[node], party.types(node, 0))
        edge = self._add(f"{node.name}.loss", source, end, flows, convertible=True)
        nbytes = nbytes_of(self.candidates.sites[node], 0)
        self.shared[node, "loss"] = Shared(1, nbytes, flows, [edge])

    def _target(self, site: Site, place: int) -> End:
        number = self.number[site.node]
        return End(number, self.candidates.parties[number].needs(site.node, place))

    def _add(
        self,
        name: str,
        source: End,
        target: End,
        flows: bool,
        convertible: bool,
        held: bool = False,
    ) -> int:
        """Add an edge with the pairs of types that may stand at its ends."""
        pairs = {(a, t) for a in source.types for t in target.types}
        allowed = (p for p in pairs if self._leads(*p, flows, convertible, held))
        self.edges.append(Edge(name, source, target, frozenset(allowed)))
        return len(self.edges) - 1

    def _leads(
        self, a: Placement, t: Placement, flows: bool, convertible: bool, held: bool
    ) -> bool:
        """Whether a value of type `a` may be read as type `t`."""
        if a == t or (a.is_whole and t.is_whole and not flows):
            return True
        if not convertible or (held and a.kind == "S"):
            return False
        if a.kind == t.kind == "S" and (a.dim == t.dim or a.segments or t.segments):
            return False
        return conversion(a, t, differentiable=flows) is not None

    # Charges

    def charges(self) -> Iterator[Charge]:
        """Conversions, and what is kept."""
        yield from self.conversions()
        if self.keeping is not None:
            yield from self.keeping.charges(self.edges, tuple(self.shared.values()))

    def conversions(self) -> Iterator[Charge]:
        """What converting costs: once in each block for each type that is needed there."""
        for shared in self.shared.values():
            for pair, events in by_pair(shared.edges, self.edges).items():
                once = self.prices.conversion(*pair, shared.nbytes, flows=shared.flows)
                if once and pair[0] != pair[1]:
                    yield Charge(events, shared.count * once)


def _result(site: Site, place: int) -> int:
    """Which result of its maker an operand is."""
    if site.call.is_item:
        return item_of(site.call)
    operand = site.call.operands[place]
    same = [
        k
        for k, other in enumerate(site.call.operands)
        if (other.node, other.argument, other.index)
        == (operand.node, operand.argument, operand.index)
    ]
    return same.index(place)
