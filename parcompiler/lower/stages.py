"""Blocks on stages -> stage programs: calls in order, values received and given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from parcompiler.capture.blocks import Cut
from parcompiler.capture.effects import effects_of
from parcompiler.capture.prologue import cone
from parcompiler.cost.selective import running_again
from parcompiler.graph import Block, EmbeddingLookup, Graph, dtype_of, order_of, shape_of
from parcompiler.lower.lowered import (
    Call,
    Spread,
    SpreadLayer,
    StageProgram,
    StageValue,
    TiedTensor,
)
from parcompiler.lower.names import variables
from parcompiler.plan import Plan
from parcompiler.schedules.action import NOWHERE
from parcompiler.timeline.order import detached


class Division:
    """The stage of every node of the graph under a plan, from which stage programs are made."""

    def __init__(self, graph: Graph, plan: Plan, cut: Cut) -> None:
        assert plan.stages is not None
        self.graph = graph
        self.cut = cut
        self.effects = effects_of(graph)
        self.variables = variables(graph, cut)
        by_name = {block.name: block for block in cut.blocks}
        self.blocks = [[by_name[name] for name in choice.blocks] for choice in plan.stages]
        self.ranks = [choice.rank for choice in plan.stages]
        self.stage_of = {
            node: j
            for j, blocks in enumerate(self.blocks)
            for block in blocks
            for node in block.nodes
        }
        self.prologue = set(cut.prologue)
        self.inputs = [n for n in graph.fx_graph.nodes if n.name in graph.input_nodes]
        self.recompute, self.offload = frozenset(plan.recompute or ()), plan.offload
        self.selective = plan.selective
        spread = graph.vocabulary
        self.embedded = tuple(item.node for item in spread.lookups) if spread else ()
        self.headed = spread.head.x if spread and spread.head else None  # the input of the head

    def stages(self) -> tuple[StageProgram, ...]:
        """One program per stage."""
        return tuple(self._stage(j) for j in range(len(self.blocks)))

    def values(self) -> dict[str, StageValue]:
        """The values that cross stages, by name, in order of execution."""
        made = [(node, NOWHERE) for node in self.embedded]
        made += [(n, self.stage_of[n]) for block in self.cut.blocks for n in block.outputs]
        values = (self._value(node, producer) for node, producer in made)
        return {value.name: value for value in values if value.consumers}

    def _value(self, node: fx.Node, producer: int) -> StageValue:
        """A node's value and the other stages that use it."""
        leading = self.graph.differentiable
        users: dict[int, bool] = {}  # by stage: whether its use leads to the loss
        for user in node.users:
            j = self.stage_of.get(user, producer)
            if j != producer:
                users[j] = users.get(j, False) or user.name in leading
        differentiable, made = node.name in leading, producer != NOWHERE
        apart = detached(producer, users, self.ranks) if differentiable and made else ()
        return StageValue(
            name=self.variables[node],
            shape=shape_of(node),
            dtype=dtype_of(node),
            differentiable=differentiable,
            producer=producer,
            consumers=tuple(sorted({*users, *([NOWHERE] if node is self.headed else [])})),
            order=order_of(node),
            detached=apart,
        )

    def tied(self) -> tuple[TiedTensor, ...]:
        """Trainable tensors that several ranks hold."""
        holders: dict[str, set[int]] = {}
        for j, blocks in enumerate(self.blocks):
            for name in _tensors(blocks):
                holders.setdefault(name, set()).add(self.ranks[j])
        shared = [
            n for n, ranks in holders.items() if len(ranks) > 1 and self.graph.by_name[n].trainable
        ]
        return tuple(
            TiedTensor(f"tied_{k}", name, tuple(sorted(holders[name])))
            for k, name in enumerate(shared)
        )

    def spread(self, method: str) -> Spread | None:
        """The layers of the vocabulary on all ranks, with their stages and inputs; None when every
        layer is on a stage."""
        vocabulary, by_name = self.graph.vocabulary, self.graph.by_name
        if vocabulary is None:
            return None
        sizes = {name: by_name[x.weight].shape[0] for x in vocabulary.all for name in x.tensors}
        head = None
        if (item := vocabulary.head) is not None:
            stage, inputs = self.stage_of[item.x], self._read(item.targets)
            head = SpreadLayer(self.variables[item.x], item, stage, inputs)
        return Spread(method, tuple(map(self._lookup, vocabulary.lookups)), head, sizes)

    def _lookup(self, item: EmbeddingLookup) -> SpreadLayer[EmbeddingLookup]:
        """A lookup with the stage that uses it: its users are in one block."""
        (stage,) = {self.stage_of[user] for user in item.node.users if user in self.stage_of}
        return SpreadLayer(self.variables[item.node], item, stage, self._read(item.indices))

    def _read(self, small: fx.Graph) -> tuple[str, ...]:
        """The tensors of the batch that a small graph reads."""
        read = [node.name for node in small.nodes if node.op == "placeholder"]
        inputs = {node.name: self.variables[node] for node in self.inputs}
        return tuple(inputs[name] for name in read if name in inputs)

    def _stage(self, j: int) -> StageProgram:
        """The program of stage `j`."""
        blocks = self.blocks[j]
        needed = {node for block in blocks for node in block.inputs}
        prologue = self._prologue(needed)
        read = {operand for node in prologue for operand in node.all_input_nodes}
        made = (n for b in self.cut.blocks for n in b.outputs if self.stage_of[n] != j)
        received = [n for n in (*self.embedded, *made) if n in needed]
        leaving = [n for b in blocks for n in b.outputs if self._leaves(n, j)]
        has_loss = self.stage_of.get(self.graph.loss) == j
        return StageProgram(
            index=j,
            rank=self.ranks[j],
            calls=tuple(self._call(block) for block in blocks),
            prologue=prologue,
            inputs=tuple(self.variables[n] for n in self.inputs if n in needed | read),
            receives=tuple(self.variables[n] for n in received),
            gives=tuple(self.variables[n] for n in leaving),
            loss=self.variables[self.graph.loss] if has_loss else None,
            tensors=tuple(self._stage_tensors(j, blocks, read)),
            trained=self.graph.trains(blocks),
            keeps=tuple(
                dict.fromkeys(
                    self.variables[n] for n in self.graph.kept.values() if self.stage_of.get(n) == j
                )
            ),
        )

    def _call(self, block: Block) -> Call:
        """The call of a block, with the names of the values that it reads and returns."""
        return Call(
            block,
            tuple(self.variables[node] for node in block.inputs),
            tuple(self.variables[node] for node in block.outputs),
            recompute=block.name in self.recompute and not self.offload,
            offload=block.name in self.recompute and self.offload,
            again=running_again(self.graph, block) if self.selective else frozenset(),
        )

    def _prologue(self, needed: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        """The prologue nodes that a stage computes for itself, in order."""
        wanted: set[fx.Node] = set()
        for node in needed:
            if node in self.prologue:
                wanted |= cone(node, self.effects)
        return tuple(node for node in self.cut.prologue if node in wanted)

    def _leaves(self, node: fx.Node, j: int) -> bool:
        """Whether another stage, or the head on all ranks, uses a node of stage `j`."""
        if node is self.headed:
            return True
        return any(self.stage_of.get(user, j) != j for user in node.users)

    def _stage_tensors(self, j: int, blocks: list[Block], read: set[fx.Node]) -> Iterator[str]:
        """The parameters and buffers of a stage; those that no stage reads are on the first."""
        known = {*_tensors(blocks), *(self.graph.unread if j == 0 else ())}
        nodes = {node.name for node in read}
        for item in self.graph.parameters:
            if item.name in known or item.node in nodes:
                yield item.name


def _tensors(blocks: Iterable[Block]) -> Iterator[str]:
    """Names of the parameters and buffers that blocks read."""
    yield from (binding.name for block in blocks for binding in block.tensors)
