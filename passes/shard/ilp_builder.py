"""Builds the integer programme of a folded graph: decisions, edges, and costs that edges share.

Each block makes a conversion once for each type that it needs, as in `spmd.shard`. A tensor of the
model is held in pieces only where all its readers take the same pieces, else whole (`I`, or `R`
without a gradient).

Memory is that of all stages together, divided by their number: the parameters with gradient and
optimizer states, and the values that are saved for the backward of each micro-batch in flight.
Where blocks are recomputed, what one of them saves until its own backward comes on top. A
saved value counts once for each form in which it is saved: as it is made, and as it is converted
(gathered from pieces, say). Views share the memory of their base. Under selective recomputation,
results of operators that run again are not saved, and of gathered values only the pieces are.

    add ─► x ──────────────► layer_norm      saves x as it was made: one cost for each type of x,
             └─ all-gather ─► linear         due with any of its events; and saves the gathered x
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from torch import fx

from parcompiler.cost.selective import running_again
from parcompiler.passes.shard.candidates import Candidates, NodeChoices, NodeGroup, result_index
from parcompiler.passes.shard.ilp import (
    BlockBytes,
    ChoiceEvent,
    Decision,
    Edge,
    EdgeEnd,
    EdgeEvent,
    Event,
    Pair,
    Programme,
    SharedCost,
)
from parcompiler.passes.shard.node_costs import WHOLE, nbytes_of, share
from parcompiler.passes.shard.pins import Pins
from parcompiler.passes.shard.templates import TensorGroup, end_of
from parcompiler.spmd import I, Placement, R, Strategy
from parcompiler.spmd.conversions import conversion

GATHERS = frozenset({("S", "R"), ("S", "I")})  # kinds of types between which pieces are gathered


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes on each rank, ranks of the pipeline, micro-batches in flight on a rank, and what counts
    as saved of each micro-batch."""

    nbytes: float
    stages: int
    in_flight: int
    saved: SavedValues


class SavedValues(NamedTuple):
    """What counts as saved for the backward.

    `recomputed`: blocks are recomputed, and save only their inputs, until they run again.
    `selective`: cheap operators run again, and nothing of them is saved. `inside`: inputs of blocks
    do not count.
    """

    recomputed: bool = False
    selective: bool = False
    inside: bool = False


class StateCost(NamedTuple):
    """Costs of one element of a tensor of the model: bytes with gradient and optimizer states, and
    seconds of its update, divided by the number of micro-batches."""

    nbytes: float
    seconds: float = 0.0


@dataclass(frozen=True)
class BuiltProgramme:
    """The programme, and the subjects of its decisions: groups of nodes, then tensors. Its bytes
    are those of one of the `in_flight` micro-batches."""

    programme: Programme
    groups: tuple[NodeGroup, ...]
    tensors: Mapping[TensorGroup, tuple[Placement, ...]]
    in_flight: int


class _Form(NamedTuple):
    """The part of the programme that does not depend on the costs of tensors: decisions of groups
    of nodes, possible placements of tensors, edges, shared costs."""

    groups: tuple[Decision, ...]
    tensors: Mapping[TensorGroup, tuple[Placement, ...]]
    edges: tuple[Edge, ...]
    shared: tuple[SharedCost, ...]
    blocks: tuple[BlockBytes, ...]


def build(
    candidates: Candidates,
    pins: Pins,
    states: Mapping[str, StateCost],
    memory: MemoryBudget | None,
) -> BuiltProgramme:
    """The programme of a folded graph; `states` has the costs of elements of its tensors, if known.

    Its bytes are those of one micro-batch in flight, so that only the costs of tensors differ
    between meshes with the same number of tensor ranks.
    """
    saved = None if memory is None else memory.saved
    in_flight = 1 if memory is None else memory.in_flight
    budget = None if memory is None else memory.nbytes * memory.stages / in_flight
    part = 0.0 if memory is None else 1 / in_flight
    weight = 1.0 if memory is None else memory.stages / in_flight  # of what one rank holds
    pinned = tuple((name, pins.placements[name]) for name in pins.matches)
    form = candidates.folded.graph.once(
        ("programme", candidates, pinned, saved), lambda: _form(candidates, pins, saved)
    )
    tensors = (
        _tensor_decision(tensor, types, states, candidates.costs.n, part)
        for tensor, types in form.tensors.items()
    )
    decisions = *form.groups, *tensors, Decision("loss", (0.0,), (0.0,))
    programme = Programme(decisions, form.edges, form.shared, budget, form.blocks, weight)
    return BuiltProgramme(programme, candidates.groups, form.tensors, in_flight)


def _form(candidates: Candidates, pins: Pins, saved: SavedValues | None) -> _Form:
    """Build everything that does not depend on the costs of tensors."""
    if saved is None or not saved.recomputed:
        return _ProgrammeBuilder(candidates, pins, saved).form()
    form = _ProgrammeBuilder(candidates, pins, SavedValues(recomputed=True)).form()
    again = saved._replace(recomputed=False, inside=True)
    blocks = _ProgrammeBuilder(candidates, pins, again).blocks()
    return form._replace(blocks=tuple(blocks))


def _tensor_decision(
    tensor: TensorGroup,
    types: Sequence[Placement],
    states: Mapping[str, StateCost],
    ranks: int,
    part: float,
) -> Decision:
    """The decision how a rank holds the tensors of a group; bytes are multiplied by `part`."""
    alike = Counter((x.shape, states.get(x.name, StateCost(0.0))) for x in tensor.items)

    def cost(placement: Placement) -> StateCost:
        nbytes, seconds = 0.0, 0.0
        for (shape, each), count in alike.items():
            on_rank = count * share(shape, placement, ranks)
            nbytes += each.nbytes * math.prod(shape) * on_rank
            seconds += each.seconds * math.prod(shape) * on_rank + WHOLE * on_rank
        return StateCost(nbytes * part, seconds)

    costs = list(map(cost, types))
    seconds, nbytes = tuple(c.seconds for c in costs), tuple(c.nbytes for c in costs)
    return Decision(tensor.items[0].name, seconds, nbytes)


class _EdgeStart(NamedTuple):
    """Where an edge starts. `key` identifies the value, `carries` says that it has a gradient.

    `node` is the node of a block that makes it; `stored` says that it is a tensor of the model,
    and `pinned` that the user pinned its placement.
    """

    key: object
    name: str
    end: EdgeEnd
    nbytes: int
    convertible: bool
    carries: bool = True
    stored: bool = False
    pinned: bool = False
    node: fx.Node | None = None


@dataclass
class _SharedConversions:
    """The edges of one value into one template: each block converts it once for all of them.

    `count` blocks read it from there, `carries` says that gradients come back, `again` that the
    value is computed again, and `saving` are the edges to nodes that save it for their backward.
    The blocks are those of `template`; the loss is outside of all.
    """

    count: int
    nbytes: int
    carries: bool
    edges: list[int] = field(default_factory=list)
    saving: list[int] = field(default_factory=list)
    again: bool = False
    template: int | None = None


class _ProgrammeBuilder:
    """Builds the programme of one micro-batch in flight; `saved` is None where memory does not
    count."""

    def __init__(self, candidates: Candidates, pins: Pins, saved: SavedValues | None) -> None:
        self.candidates = candidates
        self.folded = candidates.folded
        self.costs = candidates.costs
        self.pins = pins
        self.saved = saved
        self.edges: list[Edge] = []
        self.conversions: dict[tuple[object, ...], _SharedConversions] = {}
        self.number = {
            member.node: number
            for number, group in enumerate(candidates.groups)
            for member in group.members
        }
        first = len(candidates.groups)
        self.tensor_number = {t: first + k for k, t in enumerate(self.folded.tensor_groups)}
        # For each node that makes memory, the edges to readers that save it or a view of it; and
        # the nodes whose memory a node of their own group saves.
        self.saved_by: dict[fx.Node, list[tuple[fx.Node, int]]] = {}
        self.saved_inside: set[fx.Node] = set()
        graph, blocks = self.folded.graph, [one.first for one in self.folded.templates]
        is_selective = saved is not None and saved.selective
        again = (running_again(graph, block) for block in blocks if is_selective)
        self.again: frozenset[fx.Node] = frozenset[fx.Node]().union(*again)

    def form(self) -> _Form:
        """All but the blocks that run again."""
        self.add_edges()
        groups, shared = tuple(self.decisions()), tuple(self.shared_costs())
        return _Form(groups, self.tensors, tuple(self.edges), shared, ())

    @cached_property
    def tensors(self) -> dict[TensorGroup, tuple[Placement, ...]]:
        """Possible placements of each tensor of the model: whole, or in pieces that nodes read."""
        pieces: dict[TensorGroup, set[Placement]] = {t: set() for t in self.folded.tensor_groups}
        for member in self.candidates.nodes.values():
            for place, operand in enumerate(member.call.operands):
                item = self.folded.graph.by_node.get(operand.node.name)
                if item is not None:
                    types = (strategy.inputs[place] for strategy in member.strategies)
                    split = (placement for placement in types if placement.kind == "S")
                    pieces[self.folded.group_of[item.name]].update(split)
        tensors = {}
        for tensor, types_of_pieces in pieces.items():
            carries = tensor.node.name in self.folded.graph.differentiable
            whole = I if carries and self.costs.axis == "tensor" else R
            possible = (whole, *(() if tensor.outside else sorted(types_of_pieces, key=str)))
            tensors[tensor] = self.pins.allowed(tensor, possible)
        return tensors

    # Decisions

    def decisions(self) -> Iterator[Decision]:
        """The decisions of the groups of nodes."""
        for group in self.candidates.groups:
            count = self._count(group.members[0].node)
            seconds, nbytes = (
                tuple(count * sum(map(cost, group.members, choice)) for choice in group.choices)
                for cost in (self._seconds, self._saved_besides)
            )
            yield Decision(group.name, seconds, nbytes)

    def _count(self, node: fx.Node) -> int:
        """The number of blocks that a node stands for."""
        return len(self.folded.templates[self.folded.home[node]].blocks)

    def _seconds(self, member: NodeChoices, strategy: Strategy) -> float:
        return self.costs.strategy_seconds(member.call, member.work, strategy)

    def _saved_besides(self, member: NodeChoices, strategy: Strategy) -> float:
        """Bytes that a node saves besides operands and results."""
        if self.saved is None or self.saved.recomputed or member.node in self.again:
            return 0.0
        if not member.call.result_shapes:  # a size that is read off a tensor
            return 0.0
        part = share(member.call.result_shapes[0], strategy.outputs[0], self.costs.n)
        return member.work.saved_besides * part

    # Edges

    def add_edges(self) -> None:
        """Add an edge for each value that a node reads and each of its sources. The loss, or the
        input of a shared head, must be whole, and so must its gradient."""
        for number, template in enumerate(self.folded.templates):
            inputs = {node: place for place, node in enumerate(template.first.inputs)}
            for node in template.first.nodes:
                member = self.candidates.nodes[node]
                for place in range(len(member.call.operands)):
                    self._add_operand(number, inputs, member, place)
        source = self._result(self.folded.stands_for[end_of(self.folded.graph)], 0)
        source = source._replace(convertible=True)
        end = self._whole(source.carries)
        edge = self._add_edge(
            source, "loss", end, source.carries, ending=self.costs.axis == "context"
        )
        shared = _SharedConversions(1, source.nbytes, source.carries, [edge])
        self.conversions[source.key, "loss"] = shared

    def _add_operand(
        self, number: int, inputs: Mapping[fx.Node, int], reader: NodeChoices, place: int
    ) -> None:
        """Add the edges to one operand of a node."""
        node, count = reader.call.operands[place].node, len(self.folded.templates[number].blocks)
        if node.name in self.folded.graph.by_node:
            self._connect(self._tensor(node.name), reader, place, count, number)
        elif node in inputs:
            for source, times in self.folded.sources(number, inputs[node]).items():
                if source is not None:
                    shared = source in self.folded.shared
                    make = self._received if shared else self._made
                    self._connect(make(source, reader, place), reader, place, times, number)
        elif node in self.number and self.number[node] != self.number[reader.node]:
            self._connect(self._made(node, reader, place), reader, place, count, number)
        elif self.saved is not None and node in reader.work.saves:
            if node in self.number and not self.saved.recomputed:
                self.saved_inside.add(self._base(node))

    def _made(self, node: fx.Node, reader: NodeChoices, place: int) -> _EdgeStart:
        """The edge start of an operand that `node` makes."""
        return self._result(node, _operand_result(reader, place))

    def _result(self, node: fx.Node, result: int) -> _EdgeStart:
        """The edge start of a result of a node."""
        maker, number = self.candidates.nodes[node], self.number[node]
        unknown = -1 in maker.call.result_shapes[result]
        fixed = unknown or node in self.folded.fixed or len(maker.call.results) > 1
        return _EdgeStart(
            (node, result),
            node.name,
            EdgeEnd(number, self.candidates.groups[number].types(node, result)),
            nbytes_of(maker.call.results[result]),
            convertible=not fixed,
            carries=node.name in self.folded.graph.differentiable,
            node=node,
        )

    def _received(self, node: fx.Node, reader: NodeChoices, place: int) -> _EdgeStart:
        """The edge start of a looked-up value, which the vocabulary's ranks yield whole."""
        nbytes = nbytes_of(reader.call.operands[place].value)
        convertible = node not in self.folded.fixed
        return _EdgeStart(node, node.name, self._whole(carries=True), nbytes, convertible)

    def _tensor(self, name: str) -> _EdgeStart:
        """The edge start of a tensor of the model."""
        item = self.folded.graph.by_node[name]
        tensor = self.folded.group_of[item.name]
        return _EdgeStart(
            item.name,
            tensor.items[0].name,
            EdgeEnd(self.tensor_number[tensor], self.tensors[tensor]),
            item.nbytes,
            convertible=tensor.node not in self.folded.fixed,
            stored=True,
            pinned=any(self.pins.of(each.name) for each in tensor.items),
        )

    def _whole(self, carries: bool) -> EdgeEnd:
        """The end of an edge outside all blocks: there value and gradient are whole."""
        return EdgeEnd(
            len(self.candidates.groups) + len(self.tensor_number), (I if carries else R,)
        )

    def _connect(
        self, source: _EdgeStart, reader: NodeChoices, place: int, count: int, number: int
    ) -> None:
        """Add the edge of a value to a reader in `count` blocks of a template."""
        operand, group = reader.call.operands[place], self.number[reader.node]
        carries = reader.call.gradients[place] and source.carries
        target = EdgeEnd(group, self.candidates.groups[group].needs(reader.node, place))
        edge = self._add_edge(source, reader.node.name, target, carries)
        key = source.key, operand.node, number, carries
        again = source.node is not None and self._base(source.node) in self.again
        new = _SharedConversions(count, source.nbytes, carries, again=again, template=number)
        shared = self.conversions.setdefault(key, new)
        shared.edges.append(edge)
        if not source.stored and self._is_saved(source, reader, operand.node, number, count):
            shared.saving.append(edge)
            if source.node is not None:
                self.saved_by.setdefault(self._base(source.node), []).append((source.node, edge))

    def _is_saved(
        self, source: _EdgeStart, reader: NodeChoices, operand: fx.Node, number: int, count: int
    ) -> bool:
        """Whether a reader saves a value; a block that is recomputed saves its inputs."""
        if self.saved is None:
            return False
        template = self.folded.templates[number]
        inside = source.node in template.first.nodes and count == len(template.blocks)
        if self.saved.recomputed:
            return not inside
        return operand in reader.work.saves and (inside or not self.saved.inside)

    def _add_edge(
        self,
        source: _EdgeStart,
        reader: str,
        target: EdgeEnd,
        carries: bool,
        *,
        ending: bool = False,
    ) -> int:
        """Add an edge with the pairs of types that it may have at its ends; returns its number."""
        pairs = {(a, t) for a in source.end.types for t in target.types}
        allowed = frozenset(
            pair
            for pair in pairs
            if _is_allowed(source, *pair, carries) or (ending and pair == (R, I))
        )
        self.edges.append(Edge(f"{source.name}.{reader}", source.end, target, allowed))
        return len(self.edges) - 1

    # Costs that edges share

    def shared_costs(self) -> Iterator[SharedCost]:
        """The costs of conversions, and of values saved for the backward: as they are made, and as
        they are converted."""
        for shared in self.conversions.values():
            for pair, events in _by_pair(shared.edges, self.edges).items():
                nbytes, carries = shared.nbytes, shared.carries
                once = self.costs.conversion_seconds(*pair, nbytes, carries=carries)
                if once and pair[0] != pair[1]:
                    yield SharedCost(events, shared.count * once)
        for base in self.candidates.nodes:
            for cost in self._saved_as_made(base):
                yield replace(cost, nbytes=self._count(base) * cost.nbytes)
        for shared in self.conversions.values():
            for cost in self._saved_converted(shared):
                yield replace(cost, nbytes=shared.count * cost.nbytes)

    def blocks(self) -> Iterator[BlockBytes]:
        """What a block of each template saves."""
        self.add_edges()
        for number, template in enumerate(self.folded.templates):
            groups = [
                (
                    place,
                    tuple(sum(map(self._saved_besides, group.members, x)) for x in group.choices),
                )
                for place, group in enumerate(self.candidates.groups)
                if self.folded.home[group.members[0].node] == number
            ]
            conversions = (
                shared for shared in self.conversions.values() if shared.template == number
            )
            saved = [cost for shared in conversions for cost in self._saved_converted(shared)]
            saved += [cost for node in template.first.nodes for cost in self._saved_as_made(node)]
            yield BlockBytes(tuple(groups), tuple(saved))

    def _saved_converted(self, shared: _SharedConversions) -> Iterator[SharedCost]:
        """The values that a block saves as it converts them."""
        if self.saved is None:
            return
        for (a, t), events in _by_pair(shared.saving, self.edges).items():
            is_gathered_again = self.saved.selective and (a.kind, t.kind) in GATHERS
            if is_gathered_again and shared.again:
                continue  # the value itself is made again, too
            if not _is_same_memory(a, t):
                saved_form = a if is_gathered_again else t
                yield SharedCost(events, 0.0, self._on_rank(shared.nbytes, saved_form))

    def _saved_as_made(self, base: fx.Node) -> Iterator[SharedCost]:
        """The memory that a node of one block makes, if the node, or a reader of it or of a view,
        saves it."""
        if base in self.again or self.saved is None:
            return
        member, number = self.candidates.nodes[base], self.number[base]
        saves_itself = member.work.saves_result and not self.saved.recomputed
        for result, value in enumerate(member.call.results):
            by_type: dict[Placement, set[int]] = {}
            for choice, made in enumerate(self.candidates.groups[number].types(base, result)):
                by_type.setdefault(made, set()).add(choice)
            for placement, choices in by_type.items():
                events: list[Event] = []
                if saves_itself or base in self.saved_inside:
                    events.append(ChoiceEvent(number, frozenset(choices)))
                for node, edge in self.saved_by.get(base, ()):
                    if result == 0 or node is base:
                        events += _read_as_made(self.edges[edge], edge, choices)
                if events:
                    nbytes = self._on_rank(nbytes_of(value), placement)
                    yield SharedCost(tuple(dict.fromkeys(events)), 0.0, nbytes)

    def _on_rank(self, nbytes: int, placement: Placement) -> float:
        """Bytes of values of this type on a rank."""
        return nbytes / self.costs.n if placement.kind == "S" else float(nbytes)

    def _base(self, node: fx.Node) -> fx.Node:
        """The node of the same group in whose memory a value lies."""
        member = self.candidates.nodes[node]
        while not member.call.is_item and member.work.is_free and len(member.call.operands) == 1:
            before = member.call.operands[0].node
            if self.number.get(before) != self.number[node]:
                break
            member = self.candidates.nodes[before]
        return member.node


def _is_allowed(source: _EdgeStart, a: Placement, t: Placement, carries: bool) -> bool:
    """Whether a value of type `a` may be read as type `t`."""
    if source.pinned and a.is_whole and t.kind == "S":
        return False  # else it would be held in pieces, not whole as pinned
    if a == t or (a.is_whole and t.is_whole and not carries):
        return True
    if not source.convertible or (source.stored and a.kind == "S"):
        return False
    if a.kind == t.kind == "S" and (a.dim == t.dim or a.segments or t.segments):
        return False
    return conversion(a, t, differentiable=carries) is not None


def _by_pair(numbers: Sequence[int], edges: Sequence[Edge]) -> dict[Pair, tuple[Event, ...]]:
    """For each pair of types, the events that one of these edges has it."""
    events: dict[Pair, list[Event]] = {}
    for number in numbers:
        for pair in sorted(edges[number].allowed, key=str):
            events.setdefault(pair, []).append(EdgeEvent(number, frozenset({pair})))
    return {pair: tuple(listed) for pair, listed in events.items()}


def _read_as_made(edge: Edge, number: int, choices: set[int]) -> Iterator[EdgeEvent]:
    """The event that an edge reads memory unconverted, as one of these choices makes it."""
    types = {edge.source.types[choice] for choice in choices}
    pairs = frozenset(p for p in edge.allowed if p[0] in types and _is_same_memory(*p))
    if pairs:
        yield EdgeEvent(number, pairs)


def _is_same_memory(a: Placement, t: Placement) -> bool:
    """Whether the conversion allocates no memory."""
    return a == t or (a.is_whole and t.is_whole)


def _operand_result(reader: NodeChoices, place: int) -> int:
    """The number of the result of its maker that an operand is: a list of tensors is one operand
    for each tensor."""
    call = reader.call
    if call.is_item:
        return result_index(call)
    where = [(operand.node, operand.argument, operand.index) for operand in call.operands]
    return where[:place].count(where[place])
