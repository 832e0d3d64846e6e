"""What is given to the passes: the model, the mesh, the options, and what everything costs.

Blocks are costed per template and per granularity, when a pass asks for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from parcompiler.capture.blocks import Cut, cut, levels
from parcompiler.capture.effects import Effects
from parcompiler.capture.prologue import cone
from parcompiler.capture.repeatable import is_repeatable
from parcompiler.cost import BlockCost, bytes_per_parameter, seconds, trace_block
from parcompiler.device import Device
from parcompiler.graph import Block, Graph, Parameter, nbytes_of
from parcompiler.mesh import Mesh
from parcompiler.options import Options
from parcompiler.plan import Plan

BUCKET = 25 * 2**20  # bytes of gradients that data ranks sum together; as DistributedDataParallel


@dataclass(frozen=True)
class Priced:
    """The blocks of one granularity with what each costs for one micro-batch on the device.

    `forward` and `backward` are seconds, `weight` those of `backward` that can be left for later.
    The blocks in `recomputed` keep no activations but what they read: their backward begins with
    their forward.
    """

    cut: Cut
    costs: tuple[BlockCost, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    sent: tuple[fx.Node, ...]
    recomputed: frozenset[str] = frozenset()

    def recomputing(self, names: Collection[str]) -> Priced:
        """The same blocks when those of these names are recomputed."""
        assert not self.recomputed
        again = [block.name in names for block in self.cut.blocks]
        rows = zip(self.forward, self.backward, again, strict=True)
        return dataclasses.replace(
            self,
            backward=tuple(back + once if twice else back for once, back, twice in rows),
            recomputed=frozenset(names),
        )

    @cached_property
    def repeatable(self) -> frozenset[str]:
        """The blocks that can be recomputed: they update nothing that outlives them."""
        first = {block.template: block for block in reversed(self.cut.blocks)}
        able = {template for template, block in first.items() if is_repeatable(block.nodes)}
        return frozenset(block.name for block in self.cut.blocks if block.template in able)

    @cached_property
    def home(self) -> dict[fx.Node, int]:
        """The block that makes each node."""
        return {node: b for b, block in enumerate(self.cut.blocks) for node in block.nodes}

    @cached_property
    def saved(self) -> tuple[int, ...]:
        """Bytes that each block keeps for its backward; a value between blocks counts once,
        with the block that makes it. A recomputed block keeps all that it reads and no more."""
        kept: set[fx.Node] = set()
        own = []
        for block, cost in zip(self.cut.blocks, self.costs, strict=True):
            if block.name in self.recomputed:
                kept.update(block.inputs)
                own.append(0)
            else:
                kept.update(block.inputs[i] for i in cost.kept_inputs)
                kept.update(block.outputs[i] for i in cost.kept_outputs)
                own.append(cost.saved - cost.saved_outputs)
        return tuple(
            inner + sum(nbytes_of(node) for node in block.outputs if node in kept)
            for block, inner in zip(self.cut.blocks, own, strict=True)
        )

    @cached_property
    def again(self) -> tuple[int, ...]:
        """Bytes that each block has in memory again while its backward runs; 0 if it is kept."""
        return tuple(
            cost.saved if block.name in self.recomputed else 0
            for block, cost in zip(self.cut.blocks, self.costs, strict=True)
        )

    def recomputed_bytes(self, blocks: Sequence[int], waiting: int) -> int:
        """Bytes that a stage with these blocks takes for recomputed activations.

        Those of one block at a time; where `waiting` micro-batches wait for their weight gradients,
        at most those of all blocks for each of them (linear layers hold what they read till then).
        """
        sizes = [self.again[b] for b in blocks]
        return waiting * sum(sizes) if waiting else max(sizes, default=0)


@dataclass(frozen=True)
class Problem:
    """What is given. A pass reads it and never changes it.

    `local` keeps the problems of one tensor rank, by sharding (see passes/shard/local.py).
    """

    graph: Graph
    mesh: Mesh
    options: Options
    _priced: dict[int, Priced] = field(default_factory=dict, repr=False, compare=False)
    _recomputing: dict[tuple[int, frozenset[str]], Priced] = field(
        default_factory=dict, repr=False, compare=False
    )
    local: dict[Any, Problem] = field(default_factory=dict, repr=False, compare=False)

    @property
    def device(self) -> Device:
        """The figures of the mesh's device."""
        return self.mesh.hardware

    @cached_property
    def levels(self) -> range:
        """The granularities at which the model can be cut; 1 is the coarsest."""
        return levels(self.graph)

    def priced(self, level: int) -> Priced:
        """The blocks at a granularity, with their costs."""
        if level not in self._priced:
            sent = self._cheaper_sent(cut(self.graph, level))
            parts = cut(self.graph, level, sent)
            by_template: dict[str, BlockCost] = {}
            for block in parts.blocks:
                if block.template not in by_template:
                    by_template[block.template] = self._trace(block)
            costs = tuple(by_template[block.template] for block in parts.blocks)
            backward = tuple(seconds(cost.backward, self.device) for cost in costs)
            weight = (seconds(cost.weight, self.device) for cost in costs)
            self._priced[level] = Priced(
                cut=parts,
                costs=costs,
                forward=tuple(seconds(cost.forward, self.device) for cost in costs),
                backward=backward,
                weight=tuple(map(min, weight, backward)),
                sent=sent,
            )
        return self._priced[level]

    def recomputing(self, level: int, names: Collection[str]) -> Priced:
        """The blocks at a granularity, with their costs when some of them are recomputed."""
        if not names:
            return self.priced(level)
        key = level, frozenset(names)
        if key not in self._recomputing:
            self._recomputing[key] = self.priced(level).recomputing(key[1])
        return self._recomputing[key]

    def under(self, plan: Plan) -> Priced:
        """The blocks of a plan with what each costs under it."""
        assert plan.granularity is not None
        return self.recomputing(plan.granularity, plan.recompute or ())

    def state_bytes(self, item: Parameter) -> int:
        """Bytes of a parameter or buffer with its gradient and optimizer states."""
        each = bytes_per_parameter(self.options.optimizer, item.dtype, trainable=item.trainable)
        return item.numel * each

    @cached_property
    def bucket_bytes(self) -> int:
        """Bytes that a rank may need to bring the gradients of a bucket together."""
        if self.mesh.data == 1:
            return 0
        return min(BUCKET, sum(item.nbytes for item in self.graph.parameters if item.trainable))

    def message_seconds(self, node: fx.Node) -> float:
        """Seconds to move a value between neighbours, and its gradient back if it has one."""
        once = self.device.link.seconds(nbytes_of(node))
        return 2 * once if node.name in self.graph.differentiable else once

    def _trace(self, block: Block) -> BlockCost:
        """The cost of one block."""
        return self._cost(block.nodes, block.inputs, block.outputs)

    def _cost(
        self, nodes: tuple[fx.Node, ...], inputs: tuple[fx.Node, ...], outputs: tuple[fx.Node, ...]
    ) -> BlockCost:
        """The cost of some nodes."""
        trainable = {item.node for item in self.graph.parameters if item.trainable}
        others = {item.node for item in self.graph.parameters} - trainable
        return trace_block(nodes, inputs, outputs, trainable, others, self.graph.differentiable)

    def _cheaper_sent(self, parts: Cut) -> tuple[fx.Node, ...]:
        """Prologue values that take longer to recompute than to receive."""
        effects = Effects(self.graph.fx_graph)
        used = {node for block in parts.blocks for node in block.inputs}
        found = []
        for node in parts.prologue:
            if node in used:
                members = cone(node, effects)
                nodes = tuple(n for n in parts.prologue if n in members)
                outside = {o: None for n in nodes for o in n.all_input_nodes if o not in members}
                inputs = tuple(o for o in outside if o.name in self.graph.input_nodes)
                cost = self._cost(nodes, inputs, (node,))
                if seconds(cost.forward, self.device) > self.device.link.seconds(nbytes_of(node)):
                    found.append(node)
        return tuple(found)
