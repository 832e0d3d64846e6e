"""Stand-ins for the programme that chooses strategies: by hand, and at random.

`greedy` takes, node after node, the strategy that converts least; parameters whose names match a
pattern are held as it says. So a few patterns make the layer of Megatron-LM.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch

from torch import fx

from parcompiler.capture.effects import Effects
from parcompiler.graph import Graph, nbytes_of
from parcompiler.spmd.call import NodeCall, read
from parcompiler.spmd.conversions import conversion, moved
from parcompiler.spmd.placement import I, P, Placement, R, parse
from parcompiler.spmd.rules import strategies
from parcompiler.spmd.segments import segmentations
from parcompiler.spmd.strategy import Strategy

Pins = Mapping[str, str]  # patterns of parameters' names -> placements
Types = dict[fx.Node, tuple[Placement, ...]]

GPT = {
    "*.qkv.*": "S(0)", "*.up.*": "S(0)", "*.out.weight": "S(1)", "*.down.weight": "S(1)",
    "*embedding.weight": "S(0)", "head.weight": "S(0)",
}  # fmt: skip
LLAMA = {
    "*.query.*": "S(0)", "*.key.*": "S(0)", "*.value.*": "S(0)", "*.gate.weight": "S(0)",
    "*.up.*": "S(0)", "*.out.weight": "S(1)", "*.down.weight": "S(1)",
    "*embedding.weight": "S(0)", "head.weight": "S(0)",
}  # fmt: skip
GPT2 = {
    "*.c_attn.weight": "S(1: 16 16 16)", "*.c_attn.bias": "S(0: 16 16 16)",
    "*.attn.c_proj.weight": "S(0)", "*.c_fc.weight": "S(1)", "*.c_fc.bias": "S(0)",
    "*.mlp.c_proj.weight": "S(0)", "*.wte.weight": "S(0)",
}  # fmt: skip


def greedy(graph: Graph, n: int, pins: Pins | None = None) -> dict[fx.Node, Strategy]:
    """The strategies that convert least, with parameters as the patterns say."""
    walk = _Walk(graph, n, pins or {})
    for node, call in walk.calls():
        walk.take(node, call, min(walk.possible(node, call), key=lambda s: walk.cost(call, s)))
    return walk.chosen


def replicated(graph: Graph, n: int) -> dict[fx.Node, Strategy]:
    """Everything on every rank."""
    walk = _Walk(graph, n, {})
    for node, call in walk.calls():
        walk.take(node, call, walk.possible(node, call)[0])
    return walk.chosen


def at_random(graph: Graph, n: int, seed: int) -> dict[fx.Node, Strategy]:
    """Any strategies that fit together; a walk that finds no way on begins again."""
    chance = random.Random(seed)
    while True:
        walk = _Walk(graph, n, {})
        for node, call in walk.calls():
            found = walk.possible(node, call)
            if not found:
                break
            walk.take(node, call, chance.choice(found))
        else:
            return walk.chosen


def fixed(graph: Graph) -> frozenset[fx.Node]:
    """The values whose memory is updated in place later: they may not be converted before."""
    effects = Effects(graph.fx_graph)
    position = {node: place for place, node in enumerate(graph.fx_graph.nodes)}
    last = {root: max(map(position.__getitem__, w)) for root, w in effects.writers.items()}
    return frozenset(n for n in position if position[n] < last.get(effects.root(n), -1))


class _Walk:
    """The types of the values so far."""

    def __init__(self, graph: Graph, n: int, pins: Pins) -> None:
        self.graph = graph
        self.n = n
        self.segments = segmentations(graph.fx_graph.nodes)
        self.fixed = fixed(graph)
        self.chosen: dict[fx.Node, Strategy] = {}
        self.types: Types = {}
        self.pinned: dict[fx.Node, Placement] = {}
        for node in graph.fx_graph.nodes:
            item = graph.by_node.get(node.name)
            self.types[node] = (I if node.name in graph.differentiable else R,)
            for pattern, text in pins.items() if item is not None else ():
                names = (item.name, *item.aliases) if item else ()
                if any(fnmatch(name, pattern) for name in names):
                    placement = parse(text)
                    if placement.dim < node.meta["val"].dim():
                        self.pinned[node] = placement
                        self.types[node] = (placement,)

    def calls(self) -> Iterator[tuple[fx.Node, NodeCall]]:
        for node in self.graph.fx_graph.nodes:
            if node.op == "call_function":
                yield node, read(node, self.graph.differentiable)

    def possible(self, node: fx.Node, call: NodeCall) -> list[Strategy]:
        """The strategies that the values at hand can be converted for."""
        known = strategies(
            node, self.n, differentiable=self.graph.differentiable, segments=self.segments
        )
        return [s for s in known if self._converts(node, call, s)]

    def _converts(self, node: fx.Node, call: NodeCall, strategy: Strategy) -> bool:
        made = node.name not in self.graph.differentiable and node in self.fixed
        made = made and not call.is_item
        if made and not all(placement.is_whole for placement in strategy.outputs):
            return False
        if node is self.graph.loss and any(call.carries) and strategy.outputs[0] == R:
            return False
        wide = any(call.carries) and R in strategy.outputs
        if wide and any(user is self.graph.loss for user in node.users):
            return False
        for operand, wanted, carries in zip(
            call.operands, strategy.inputs, call.gradients, strict=True
        ):
            types = list(self.types[operand.node])
            if len(types) > 1:
                index = node.args[1] if call.is_item else 0
                if types[int(str(index))] != wanted:
                    return False
            elif self.pinned.get(operand.node, wanted) != wanted:
                return False
            elif conversion(types[0], wanted, differentiable=carries) is None:
                return False
            elif (
                operand.node in self.fixed
                and types[0] != wanted
                and (carries or not (types[0].is_whole and wanted.is_whole))
            ):
                return False
        return True

    def cost(self, call: NodeCall, strategy: Strategy) -> tuple[float, float]:
        """Bytes that conversions send, now and for summands later; then elements that result."""
        sent = 0.0
        for operand, wanted, carries in zip(
            call.operands, strategy.inputs, call.gradients, strict=True
        ):
            (source, *more) = self.types[operand.node]
            if not more and source != wanted:
                row = conversion(source, wanted, differentiable=carries)
                assert row is not None
                nbytes = _size(operand.node)
                sent += moved(row.forward, nbytes, self.n) + moved(row.backward, nbytes, self.n)
        sent += sum(2.0 * _size(call.node) for p in strategy.outputs if p == P)
        sent -= sum(2.0 * _size(o.node) for o in call.operands if self.types[o.node] == (P,))
        pieces = sum(p.kind == "S" for p in (*strategy.outputs, *strategy.inputs))
        return sent, -pieces if any(call.carries) else 0

    def take(self, node: fx.Node, call: NodeCall, strategy: Strategy) -> None:
        self.chosen[node] = strategy
        self.types[node] = strategy.outputs or (R,)


def _size(node: fx.Node) -> float:
    value = node.meta["val"]
    return float(nbytes_of(node)) if hasattr(value, "shape") else 0.0


def shown(assignment: Mapping[fx.Node, Strategy], nodes: Iterable[fx.Node]) -> str:
    """A line for each node."""
    return "\n".join(f"{node.name}: {assignment[node]}" for node in nodes if node in assignment)
