"""What the programme is told of memory: which values are kept for the backward, in which form.

A value is counted once for each form in which it is kept: as its maker made it, and as it was
converted (whole and gathered from pieces, say). Views share it with their base.

    add ─► x ──────────────► layer_norm      keeps x as it was made: one charge for each type of x,
             └─ all-gather ─► linear         due with any of its events; and keeps what is gathered
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from parcompiler.passes.shard.candidates import Candidates, Site
from parcompiler.passes.shard.programme import Charge, Choosing, Edge, Event, Pair, Passing
from parcompiler.spmd import Placement
from parcompiler.spmd.call import shape_of


@dataclass(frozen=True, slots=True)
class Memory:
    """What fits: bytes on each rank, ranks of the pipeline, micro-batches in flight on a rank.

    `whole_blocks` says that blocks are recomputed, and keep no more than what they read.
    """

    nbytes: float
    stages: int
    in_flight: int
    whole_blocks: bool = False


@dataclass
class Shared:
    """The edges of one value into one template: what they convert is shared by each block.

    `count` are the blocks that read it so, `flows` says that gradients come back, and `keepers` are
    the edges to who keeps the value.
    """

    count: int
    nbytes: int
    flows: bool
    edges: list[int] = field(default_factory=list)
    keepers: list[int] = field(default_factory=list)


@dataclass
class Keeping:
    """Who keeps what. `number` is the group of each node, `blocks` the blocks that it stands for.

    `readers` has for each node that makes memory the edges through which it, or a view of it, is
    kept; `inside` are the nodes whose memory one of their own party keeps.
    """

    candidates: Candidates
    memory: Memory
    number: Mapping[fx.Node, int]
    blocks: Mapping[fx.Node, int]
    readers: dict[fx.Node, list[tuple[fx.Node, int]]] = field(default_factory=dict)
    inside: set[fx.Node] = field(default_factory=set)

    def note(self, node: fx.Node, edge: int) -> None:
        """A value is kept by who reads it through an edge."""
        self.readers.setdefault(self._base(node), []).append((node, edge))

    def note_inside(self, node: fx.Node) -> None:
        """A value is kept by one who is decided together with its maker."""
        self.inside.add(self._base(node))

    def charges(self, edges: Sequence[Edge], shared: Sequence[Shared]) -> Iterator[Charge]:
        """What is kept for the backward: values as they are made, and as they are converted."""
        for base in self.candidates.sites:
            yield from self._as_made(base, edges)
        for item in shared:
            for (a, t), events in by_pair(item.keepers, edges).items():
                if not _is_same_memory(a, t):
                    yield Charge(events, 0.0, self._flying(item.count, item.nbytes, t))

    def _as_made(self, base: fx.Node, edges: Sequence[Edge]) -> Iterator[Charge]:
        """The memory that a node makes, where the node, or one who reads it or a view, keeps it."""
        site, group = self.candidates.sites[base], self.number[base]
        party = self.candidates.parties[group]
        itself = site.work.keeps_result and not self.memory.whole_blocks
        for result in range(len(site.call.results)):
            for placement, choices in _by_type(party.types(base, result)).items():
                events: list[Event] = []
                if itself or base in self.inside:
                    events.append(Choosing(group, choices))
                for node, number in self.readers.get(base, ()):
                    if result == 0 or node is base:
                        events += _read_as_made(edges[number], number, choices)
                if events:
                    every = tuple(dict.fromkeys(events))
                    size = nbytes_of(site, result)
                    yield Charge(every, 0.0, self._flying(self.blocks[base], size, placement))

    def _flying(self, count: int, nbytes: int, placement: Placement) -> float:
        """Bytes of a value of that type in all blocks, for the micro-batches in flight."""
        part = 1 / self.candidates.prices.n if placement.kind == "S" else 1.0
        return count * nbytes * part * self.memory.in_flight

    def _base(self, node: fx.Node) -> fx.Node:
        """The node whose memory a value lies in, as far as its party goes."""
        site = self.candidates.sites[node]
        while not site.call.is_item and site.work.is_free and len(site.call.operands) == 1:
            before = site.call.operands[0].node
            if self.number.get(before) != self.number[node]:
                break
            site = self.candidates.sites[before]
        return site.node


def by_pair(numbers: Sequence[int], edges: Sequence[Edge]) -> dict[Pair, tuple[Event, ...]]:
    """For each pair of types the events that one of these edges leads through it."""
    found: dict[Pair, list[Event]] = {}
    for number in numbers:
        for pair in sorted(edges[number].allowed, key=str):
            found.setdefault(pair, []).append(Passing(number, frozenset({pair})))
    return {pair: tuple(events) for pair, events in found.items()}


def nbytes_of(site: Site, result: int) -> int:
    """The size of a result, whole."""
    value = site.call.results[result]
    return math.prod(size for size in shape_of(value) if size >= 0) * value.itemsize


def _read_as_made(edge: Edge, number: int, choices: frozenset[int]) -> Iterator[Passing]:
    """The event that an edge reads memory as one of these choices makes it."""
    types = {edge.source.types[choice] for choice in choices}
    pairs = frozenset(p for p in edge.allowed if p[0] in types and _is_same_memory(*p))
    if pairs:
        yield Passing(number, pairs)


def _is_same_memory(a: Placement, t: Placement) -> bool:
    """Whether converting makes no new memory."""
    return a == t or (a.is_whole and t.is_whole)


def _by_type(types: tuple[Placement, ...]) -> dict[Placement, frozenset[int]]:
    found: dict[Placement, set[int]] = {}
    for choice, placement in enumerate(types):
        found.setdefault(placement, set()).add(choice)
    return {placement: frozenset(choices) for placement, choices in found.items()}
