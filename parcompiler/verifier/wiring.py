"""The values between stages: which stage makes each, and which others read it.

Derived from the calls alone. The other tables (`values`, `gives`, `tied`, the instruction lists)
were written independently, and are compared with this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import fx

from parcompiler.capture.effects import Effects
from parcompiler.graph import Block, EmbeddingLookup, Parameter, VocabularyHead
from parcompiler.lower.lowered import Lowered, SpreadLayer, StageProgram
from parcompiler.schedules.action import NOWHERE


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that goes from the stage that makes it to the stages of one rank that read it.

    `source` and `target` are ranks; equal if the value stays on a rank.
    """

    name: str
    maker: int
    source: int
    readers: tuple[int, ...]
    target: int
    differentiable: bool


class Wiring:
    """The stages of a lowered program, each identified by its index in the tuple."""

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.graph = lowered.graph
        self.stages = lowered.stages
        self.effects = Effects(self.graph.fx_graph)
        self.spread = lowered.vocabulary

    @property
    def head(self) -> SpreadLayer[VocabularyHead] | None:
        """The head that all ranks have rows of."""
        return self.spread.head if self.spread else None

    @cached_property
    def lookups(self) -> dict[str, SpreadLayer[EmbeddingLookup]]:
        """The embeddings that all ranks have rows of, by the values that they give."""
        return {item.value: item for item in self.spread.lookups} if self.spread else {}

    @cached_property
    def everywhere(self) -> frozenset[fx.Node]:
        """The nodes that all ranks compute together."""
        return frozenset(x.layer.node for x in self.spread.all) if self.spread else frozenset()

    @cached_property
    def rows(self) -> frozenset[str]:
        """The parameters and buffers of which every rank holds rows."""
        return frozenset(self.spread.tensors if self.spread else ())

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        """The node of each name."""
        return {name: node for node, name in self.lowered.variables.items()}

    @cached_property
    def homes(self) -> dict[fx.Node, list[tuple[int, Block]]]:
        """Stage and block of every call that runs a node."""
        homes: dict[fx.Node, list[tuple[int, Block]]] = {}
        for j, stage in enumerate(self.stages):
            for call in stage.calls:
                for node in call.block.nodes:
                    homes.setdefault(node, []).append((j, call.block))
        return homes

    @cached_property
    def position(self) -> dict[fx.Node, int]:
        """The index of each node in the model."""
        return {node: index for index, node in enumerate(self.graph.fx_graph.nodes)}

    @cached_property
    def views(self) -> dict[fx.Node, list[fx.Node]]:
        """The nodes that share the memory of each root, with the root."""
        views: dict[fx.Node, list[fx.Node]] = {}
        for node in self.position:
            views.setdefault(self.effects.root(node), []).append(node)
        return views

    @cached_property
    def recomputed(self) -> frozenset[fx.Node]:
        """The nodes in some stage's prologue."""
        return frozenset(node for stage in self.stages for node in stage.prologue)

    @cached_property
    def makers(self) -> dict[str, int]:
        """The first stage whose calls result in each name; NOWHERE for lookups."""
        makers: dict[str, int] = dict.fromkeys(self.lookups, NOWHERE)
        for j, stage in enumerate(self.stages):
            for call in stage.calls:
                for name in call.results:
                    makers.setdefault(name, j)
        return makers

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        """The stages that receive each value from another one; NOWHERE for the head."""
        readers: dict[str, list[int]] = {}
        if self.head is not None and self.head.value in self.makers:
            readers[self.head.value] = [NOWHERE]
        for j, stage in enumerate(self.stages):
            for name in dict.fromkeys(stage.receives):
                if self.makers.get(name, j) != j:
                    readers.setdefault(name, []).append(j)
        return readers

    @cached_property
    def crossings(self) -> tuple[Crossing, ...]:
        """Every value that another stage reads, once per rank that does."""
        crossings = []
        for name, everyone in self.readers.items():
            maker, readers = self.makers[name], [j for j in everyone if j != NOWHERE]
            if maker == NOWHERE:
                continue
            source = self.stages[maker].rank
            for target in sorted({self.stages[j].rank for j in readers}):
                stages = tuple(j for j in readers if self.stages[j].rank == target)
                back = self.differentiable(name) and (
                    source == target or any(self.leads(name, j) for j in stages)
                )
                crossings.append(Crossing(name, maker, source, stages, target, back))
        return tuple(crossings)

    @cached_property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """The stages that hold each parameter or buffer."""
        holders: dict[str, list[int]] = {}
        for j, stage in enumerate(self.stages):
            for name in dict.fromkeys(stage.tensors):
                holders.setdefault(name, []).append(j)
        return {name: tuple(stages) for name, stages in holders.items()}

    def rank_of(self, j: int) -> int | None:
        """The rank of a stage, if both exist."""
        rank = self.stages[j].rank if 0 <= j < len(self.stages) else -1
        return rank if 0 <= rank < self.lowered.size else None

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """The ranks that hold a parameter or buffer as a whole, sorted."""
        return tuple(sorted({self.stages[j].rank for j in self.holders.get(name, ())}))

    def differentiable(self, name: str) -> bool:
        """Whether a gradient comes back for a value."""
        node = self.nodes.get(name)
        return node is not None and node.name in self.graph.differentiable

    def leads(self, name: str, j: int) -> bool:
        """Whether a direct user of a value on stage `j` carries a gradient."""
        users = self.nodes[name].users if name in self.nodes else ()
        leading = (user for user in users if user.name in self.graph.differentiable)
        return any(j == home for user in leading for home, _ in self.homes.get(user, ()))

    @cached_property
    def trained(self) -> frozenset[int]:
        """The stages that compute something that depends on a trained parameter and leads to the
        loss: the others have no backward."""
        blocks = ([call.block for call in stage.calls] for stage in self.stages)
        return frozenset(j for j, blocks_of in enumerate(blocks) if self.graph.trains(blocks_of))

    def tensor(self, node: fx.Node) -> Parameter | None:
        """The parameter or buffer that a node stands for."""
        return self.graph.by_node.get(node.name)

    def updates_buffers(self, stage: StageProgram) -> bool:
        """Whether a stage updates state that its next micro-batch reads."""
        known = (self.graph.by_name.get(name) for name in stage.tensors)
        return any(item.mutated for item in known if item is not None)
