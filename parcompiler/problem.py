"""What is given to the passes: the model, the mesh, the options, and what everything costs.

Blocks are costed per template and per granularity, when a pass asks for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from parcompiler.capture.blocks import Cut, cut, levels
from parcompiler.capture.effects import Effects
from parcompiler.capture.prologue import cone
from parcompiler.cost import BlockCost, bytes_per_parameter, seconds, trace_block
from parcompiler.device import Device
from parcompiler.graph import Block, Graph, Parameter, nbytes_of
from parcompiler.mesh import Mesh
from parcompiler.options import Options


@dataclass(frozen=True)
class Priced:
    """The blocks of one granularity with what each costs for one micro-batch on the device."""

    cut: Cut
    costs: tuple[BlockCost, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    sent: tuple[fx.Node, ...]

    @cached_property
    def home(self) -> dict[fx.Node, int]:
        """The block that makes each node."""
        return {node: b for b, block in enumerate(self.cut.blocks) for node in block.nodes}

    @cached_property
    def saved(self) -> tuple[int, ...]:
        """Bytes that each block keeps for its backward; a value between blocks counts once,
        with the block that makes it."""
        pairs = list(zip(self.cut.blocks, self.costs, strict=True))
        kept = {block.inputs[i] for block, cost in pairs for i in cost.kept_inputs}
        kept |= {block.outputs[i] for block, cost in pairs for i in cost.kept_outputs}
        return tuple(
            cost.saved
            - cost.saved_outputs
            + sum(nbytes_of(node) for node in block.outputs if node in kept)
            for block, cost in pairs
        )


@dataclass(frozen=True)
class Problem:
    """What is given. A pass reads it and never changes it."""

    graph: Graph
    mesh: Mesh
    options: Options
    _priced: dict[int, Priced] = field(default_factory=dict, repr=False, compare=False)

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
            self._priced[level] = Priced(
                cut=parts,
                costs=costs,
                forward=tuple(seconds(cost.forward, self.device) for cost in costs),
                backward=tuple(seconds(cost.backward, self.device) for cost in costs),
                sent=sent,
            )
        return self._priced[level]

    def state_bytes(self, item: Parameter) -> int:
        """Bytes of a parameter or buffer with its gradient and optimizer states."""
        each = bytes_per_parameter(self.options.optimizer, item.dtype, trainable=item.trainable)
        return item.numel * each

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
