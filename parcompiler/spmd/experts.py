"""Experts in pieces: the graph of one expert rank, which receives tokens by all-to-all.

    grouped    rows by expert [t, h] ──► dispatch ──► product · act · product ──► combine
               weights [E/e, h, f]       the rows that arrive, by local expert
    stacked    slots [E, b, c, h] ──► all_to_all ──► product · act · product ──► all_to_all
               weights [E/e, h, f]    [E/e, e·b, c, h]

Layers are found by structure: a *grouped* product multiplies rows sorted by expert with the
matrices of their experts and reads where the rows of each end; a *stacked* product has the experts
as a dimension of its operands. Nodes between the products of one layer treat each row (or expert)
by itself, which is known from the rules of operators or found by execution; so they are computed on
the ranks of the experts, and values that they read from outside are sent there as well.

Shapes of arriving rows assume even routing: equally many rows arrive and leave.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from parcompiler.capture.effects import CASTS, name_of
from parcompiler.capture.rewriting import Rewriting, place
from parcompiler.errors import InputError
from parcompiler.graph import Graph, Parameter, nbytes_of, shape_of
from parcompiler.mesh import Mesh
from parcompiler.spmd.call import NodeCall, call_of
from parcompiler.spmd.placement import R, S, resized
from parcompiler.spmd.rules import strategies
from parcompiler.spmd.runtime_call import NodeCollectives, RuntimeCall
from parcompiler.spmd.strategy import Strategy
from parcompiler.spmd.views import permutation

GROUPED = ("grouped_mm_fallback", "_grouped_mm", "grouped_mm")
STACKED = ("einsum", "bmm", "baddbmm", "matmul")


@dataclass
class MixtureLayer:
    """The products of one layer with its experts, and the nodes between them.

    `dims` has the nodes that are computed on expert ranks, in order; for stacked experts, with two
    dimensions of each value: that of the experts and one of samples. `sources` has the same for
    values from outside. `weights` are the nodes between parameters and products, and parameters
    that other nodes inside read.
    """

    ends: fx.Node | None
    size: int
    dims: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)
    sources: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)
    weights: dict[fx.Node, None] = field(default_factory=dict)
    parameters: dict[str, None] = field(default_factory=dict)


def find(graph: Graph) -> list[MixtureLayer]:
    """The layers of experts of a graph, in order."""
    layers: dict[fx.Node, MixtureLayer] = {}
    for node in graph.fx_graph.nodes:
        if name_of(node) in GROUPED:
            rows, weight, ends = node.all_input_nodes[:3]
            if [len(shape_of(x)) for x in (rows, weight, ends)] == [2, 3, 1]:
                layer = layers.setdefault(ends, MixtureLayer(ends, shape_of(weight)[0]))
                layer.dims[node] = 0, 0
    mixtures = _stacked(graph)
    for layer in layers.values():
        products = list(layer.dims)
        _fill_between(layer, products)
        if all(_trace_weight(graph, layer, product.all_input_nodes[1]) for product in products):
            mixtures.append(layer)
    return mixtures


def _stacked(graph: Graph) -> list[MixtureLayer]:
    """The layers whose products have the experts as a dimension of their operands."""
    mixtures: list[MixtureLayer] = []
    home: dict[fx.Node, MixtureLayer] = {}
    for node in graph.fx_graph.nodes:
        if node.op != "call_function":
            continue
        layers = [home[one] for one in node.all_input_nodes if one in home]
        stack = next((one for one in node.all_input_nodes if _stack(graph, one)), None)
        if not layers and (stack is None or name_of(node) not in STACKED):
            continue
        layer = layers[0] if layers else MixtureLayer(None, shape_of(stack or node)[0])
        if all(one is layer for one in layers) and _joins(graph, layer, node):
            home[node] = layer
            if not layers:
                mixtures.append(layer)
    return [layer for layer in mixtures if layer.parameters]


def _stack(graph: Graph, node: fx.Node) -> bool:
    """Whether a node is a parameter that may be a stack of matrices."""
    item = graph.by_node.get(node.name)
    return item is not None and not item.buffer and len(item.shape) > 2


def _joins(graph: Graph, layer: MixtureLayer, node: fx.Node) -> bool:
    """Whether a node can be computed with experts in pieces, and with the samples of all ranks; if
    so, adds it to the layer."""
    call = call_of(node, graph)
    if len(call.results) != 1 or call.is_item or "exchange" in node.meta:
        return False  # exchanges of context ranks stay outside
    known = [s for s in strategies(node, 2) if not (s.sizes or s.special or s.draws)]
    for by_expert in known:
        for by_sample in known:
            if placed := _placed(graph, layer, call, by_expert, by_sample):
                dims, sources, weights = placed
                layer.dims[node] = dims
                layer.sources |= sources
                layer.weights |= dict.fromkeys(weights)
                layer.parameters |= {graph.by_node[one.name].name: None for one in weights}
                return True
    return False


def _placed(
    graph: Graph, layer: MixtureLayer, call: NodeCall, by_expert: Strategy, by_sample: Strategy
) -> tuple[tuple[int, int], dict[fx.Node, tuple[int, int]], list[fx.Node]] | None:
    """The dimensions of experts and samples in the result of a call, and in the outside operands of
    the first product; and the weights. None if the strategies do not fit."""
    out, wide = by_expert.outputs[0], by_sample.outputs[0]
    if out.kind != "S" or wide.kind != "S" or out == wide:
        return None
    first, sources, weights = not layer.dims, {}, []
    for operand, at, sample in zip(call.operands, by_expert.inputs, by_sample.inputs, strict=True):
        node = operand.node
        if node in layer.dims or node in layer.sources:
            experts, samples = layer.dims.get(node) or layer.sources[node]
            if (at, sample) != (S(experts), S(samples)):
                return None
        elif node.name in graph.by_node:
            is_own = all(x is call.node or x in layer.dims for x in node.users)
            if (at, sample) != (S(0), R) or operand.shape[0] != layer.size or not is_own:
                return None
            weights.append(node)
        elif first and at.kind == sample.kind == "S" and operand.shape[at.dim] == layer.size:
            sources[node] = at.dim, sample.dim
        else:
            return None
    return ((out.dim, wide.dim), sources, weights) if sources or not first else None


def _fill_between(layer: MixtureLayer, products: Sequence[fx.Node]) -> None:
    """Add the nodes on paths from one product to another, in the order of the graph."""
    behind: set[fx.Node] = set()
    for node in products[0].graph.nodes:
        if node in products or any(x in behind for x in node.all_input_nodes):
            behind.add(node)
    needed, pending = set(products), list(products)
    while pending:
        for operand in pending.pop().all_input_nodes:
            if operand in behind and operand not in needed:
                needed.add(operand)
                pending.append(operand)
    order = [node for node in products[0].graph.nodes if node in needed]
    layer.dims = dict.fromkeys(order, (0, 0))


def _trace_weight(graph: Graph, layer: MixtureLayer, node: fx.Node) -> bool:
    """Note the nodes from a parameter to a product. Returns whether these have no other readers."""
    path = []
    while _leaves_experts_first(node):
        path.append(node)
        node = node.all_input_nodes[0]
    item = graph.by_node.get(node.name)
    if item is None or item.shape[0] != layer.size:
        return False
    inside = {*layer.dims, *layer.weights, *path}
    if not all(user in inside for one in (node, *path) for user in one.users):
        return False
    layer.weights |= dict.fromkeys(reversed(path)) | {node: None}
    layer.parameters[item.name] = None
    return True


def _leaves_experts_first(node: fx.Node) -> bool:
    """Whether a node only casts weights, or permutes dimensions other than that of the experts."""
    casts = name_of(node) in CASTS and len(node.all_input_nodes) == 1
    return casts or (permutation(node) or [-1])[0] == 0


def on_expert_ranks(graph: Graph, mesh: Mesh) -> Graph:
    """The graph of one of a mesh's expert ranks.

    Raises InputError if there are no experts, or their number is not divisible.
    """
    n, layers = mesh.expert, find(graph)
    if not layers:
        if graph.undivided is not None and find(graph.undivided):
            message = (
                f"expert={n} sends tokens to their experts, and {graph.name} sorts those of whole "
                f"sequences, of which context ranks have pieces (context={mesh.context}): take "
                "context=1 or expert=1"
            )
            raise InputError(message)
        message = (
            f"expert={n} divides experts, and none were found in {graph.name} (stacked matrices "
            "that are multiplied with rows by expert): take expert=1"
        )
        raise InputError(message)
    for layer in layers:
        if layer.size % n:
            name = next(iter(layer.parameters))
            reason = "there are more ranks than experts" if n > layer.size else "pieces are equal"
            message = (
                f"expert={n} does not divide the {layer.size} experts of {name!r} ({reason}): "
                f"take a degree that divides {layer.size}"
            )
            raise InputError(message)
        if layer.ends is not None:
            _check_rows(graph, layer)
    return _OnExpertRanks(graph, layers, n, mesh.tensor).graph()


def divisible(graph: Graph) -> int:
    """The number that degrees of expert ranks must divide, from the experts of every layer; 1 if
    they cannot be in pieces."""
    layers = find(graph)
    try:
        for layer in layers:
            if layer.ends is not None:
                _check_rows(graph, layer)
    except InputError:
        return 1
    return math.gcd(*(layer.size for layer in layers)) or 1


def _check_rows(graph: Graph, layer: MixtureLayer) -> None:
    """Refuse operators between the products that mix rows, or depend on their number."""
    for node in layer.dims:
        if name_of(node) in GROUPED:
            continue
        call = call_of(node, graph)
        splits = any(_splits_rows(s, call, layer) for s in strategies(node, 2))
        if call.is_item or (splits and "exchange" not in node.meta):
            continue
        module = list((node.meta.get("nn_module_stack") or {"": ("", "")}).values())[-1][0]
        message = (
            f"{name_of(node)} in {module!r} stands between the products of experts and mixes rows, "
            "or knows their number, which is another on each expert rank: take expert=1"
        )
        raise InputError(message)


def _splits_rows(strategy: Strategy, call: NodeCall, layer: MixtureLayer) -> bool:
    """Whether a strategy splits exactly the rows of all operands and results."""
    if strategy.sizes or strategy.special or strategy.draws:
        return False
    wanted = [S(0) if len(operand.shape) else R for operand in call.operands]
    return list(strategy.inputs) == wanted and all(out == S(0) for out in strategy.outputs)


def _like(rows: torch.Tensor, *_: Any) -> torch.Tensor:
    """Stand-in with about the cost of sorting rows."""
    return rows.clone()


ALL_TO_ALL = RuntimeCall("all_to_all")
DISPATCH, COMBINE = (RuntimeCall(name, likeness=_like) for name in ("dispatch", "combine"))


class _OnExpertRanks(Rewriting):
    """The rewriting of one graph, node after node."""

    def __init__(self, graph: Graph, layers: Sequence[MixtureLayer], n: int, apart: int) -> None:
        super().__init__(graph)
        self.layers, self.n, self.apart = layers, n, apart
        self.home = {node: layer for layer in layers for node in layer.dims}
        self.weights = {node: layer for layer in layers for node in layer.weights}
        self.arrivals: dict[fx.Node, fx.Node] = {}  # counts of arriving rows, by `ends`
        self.sent: dict[fx.Node, fx.Node] = {}
        self.there: dict[fx.Node, fx.Node] = {}  # replacements inside layers, and of `ends`

    def graph(self) -> Graph:
        """The graph of one expert rank."""
        sizes = {name: layer.size for layer in self.layers for name in layer.parameters}
        for node in self.whole.fx_graph.nodes:
            if node in self.home:
                self._inside(node, self.home[node])
            else:
                made = self.copy(node)
                if node in self.weights:
                    value = node.meta["val"]
                    shape = (value.shape[0] // self.n, *value.shape[1:])
                    made.meta["val"] = resized(value, shape)
        items = [self._piece(item, sizes) for item in self.whole.parameters]
        undivided = self.whole.undivided or self.whole
        return self.rewritten(f"expert {self.n}", parameters=tuple(items), undivided=undivided)

    def _piece(self, item: Parameter, sizes: Mapping[str, int]) -> Parameter:
        """A parameter, as a piece if it is of experts."""
        if item.name not in sizes:
            return item
        shape = (item.shape[0] // self.n, *item.shape[1:])
        return dataclasses.replace(item, shape=shape, experts=sizes[item.name])

    def _inside(self, node: fx.Node, layer: MixtureLayer) -> None:
        """Rewrite a node that is computed on expert ranks."""
        if layer.ends is not None and layer.ends not in self.arrivals:
            self._route(node, layer, layer.ends)

        def operand(one: fx.Node) -> fx.Node:
            if one in self.there:
                return self.there[one]
            if one in layer.weights:
                return self.nodes[one]
            if one not in self.sent:
                self.sent[one] = self._sent(one, node, layer)
            return self.sent[one]

        made = self.there[node] = self.copy(node, operand)
        if layer.ends is None:
            made.meta["val"] = self._local(node, layer.dims[node])
        else:
            made.meta["arriving"] = True
        if any(user not in layer.dims for user in node.users):
            self.nodes[node] = self._returned(node, layer)

    def _route(self, node: fx.Node, layer: MixtureLayer, ends: fx.Node) -> None:
        """Add the nodes that count arriving rows, and find where those of each expert end."""
        each, value = layer.size // self.n, ends.meta["val"]
        call = RuntimeCall("expert_arrivals", likeness=lambda x: x.view(-1, each))
        exchange = self._exchange(4 * layer.size, carries=False)
        meta = place(node) | {"val": value.new_empty(self.n, each), "exchange": exchange}
        arrivals = self.insert(call.name, call, (self.nodes[ends],), meta, carries=False)
        call = RuntimeCall("expert_ends", likeness=lambda x: x.sum(0).cumsum(0).to(torch.int32))
        meta = place(node) | {"val": value.new_empty(each, dtype=torch.int32)}
        self.there[ends] = self.insert(call.name, call, (arrivals,), meta, carries=False)
        self.arrivals[ends] = arrivals

    def _sent(self, node: fx.Node, user: fx.Node, layer: MixtureLayer) -> fx.Node:
        """A value from outside, sent to the expert ranks."""
        if layer.ends is not None:
            args = self.nodes[node], self.nodes[layer.ends], self.arrivals[layer.ends]
            return self._exchanged(node, user, DISPATCH, args)
        experts, samples = layer.sources[node]
        sent = self._exchanged(node, user, ALL_TO_ALL, (self.nodes[node], samples, experts))
        sent.meta["val"] = self._local(node, (experts, samples))
        return sent

    def _returned(self, node: fx.Node, layer: MixtureLayer) -> fx.Node:
        """A value computed on expert ranks, sent back to where its rows or samples came from."""
        if layer.ends is None:
            return self._exchanged(node, node, ALL_TO_ALL, (self.there[node], *layer.dims[node]))
        rows = self.there[node], self.nodes[layer.ends], self.arrivals[layer.ends]
        return self._exchanged(node, node, COMBINE, (*rows, shape_of(node)[0]))

    def _exchanged(
        self, node: fx.Node, user: fx.Node, call: RuntimeCall, args: tuple[Any, ...]
    ) -> fx.Node:
        """A value sent to other ranks by a call, in the module of `user`."""
        carries = node.name in self.whole.differentiable
        exchange = self._exchange(nbytes_of(node), carries)
        meta = place(user) | {"val": node.meta["val"], "exchange": exchange}
        kwargs = {"axis": "expert"} if call == ALL_TO_ALL else {}
        name = f"{node.name}_{call.name}"
        return self.insert(name, call, args, meta, carries=carries, kwargs=kwargs)

    def _exchange(self, nbytes: int, carries: bool) -> NodeCollectives:
        """The all-to-alls of one value and of its gradient."""
        action: Any = (("all-to-all", float(nbytes) * self.n),)
        back = action if carries else ()
        return NodeCollectives(self.n, action, back, self.apart, axis="expert")

    def _local(self, node: fx.Node, dims: tuple[int, int]) -> torch.Tensor:
        """A rank's part, without data, of a value with experts and samples in these dimensions."""
        value: torch.Tensor = node.meta["val"]
        shape = list(value.shape)
        shape[dims[0]] //= self.n
        shape[dims[1]] *= self.n
        return resized(value, shape)
