"""A graph, and a strategy for each node -> the graph of one rank of the axis.

    whole     x ──► linear ──► gelu ──► linear ──► +            weights [64, 16] and [16, 64]
    sharded   x ──► fan_out ──► linear ──► gelu ──► linear ──► all_reduce ──► +
                               [32, 16]           [16, 32]

The result is an ordinary graph: its nodes have the names, sources and modules of the whole's, local
shapes and sizes, and where a reader needs another placement, a call of the runtime converts the
value, once for each layer. A value from outside of layers (embeddings) is converted where it is
made if all readers need the same, so that the first layer is like the others.

Where pieces differ in size the shapes are those of rank 0, which has the largest, and sizes are
`Piece`s. Sharded nodes have `meta["placements"]`, sharded values `meta["whole"]`, and nodes with
collectives `meta["exchange"]`.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from parcompiler.capture.blocks import layer_of
from parcompiler.capture.effects import effects_of, is_random, mutated_operands
from parcompiler.capture.rewriting import Rewriting, place
from parcompiler.capture.templates import unique
from parcompiler.graph import Graph, Parameter, VocabularyLayers, nbytes_of, shape_of
from parcompiler.spmd.call import NodeCall, call_of
from parcompiler.spmd.placement import I, Placement, R, local_shape, resized, shard_of
from parcompiler.spmd.rules import strategies
from parcompiler.spmd.runtime_call import conversion_call, is_same, local_size
from parcompiler.spmd.sorting import OWN_ORDER, rows_of
from parcompiler.spmd.special import special_call
from parcompiler.spmd.strategy import Strategy, localized

# Operators whose results are contiguous whatever the memory order of their operands.
ORDERED = frozenset({"linear", "embedding", "layer_norm", "native_layer_norm", "contiguous"})
Assignment = Mapping[fx.Node, Strategy]
Types = tuple[Placement, ...]  # of the tensors that a node yields


def shard(
    graph: Graph, assignment: Assignment, n: int, axis: str = "tensor", apart: int = 1
) -> Graph:
    """The graph of one of `n` ranks of an axis when every node has the strategy of `assignment`.

    On the context axis (numbers of neighbours differ by `apart`) every rank holds parameters whole,
    with a summand of their gradients. A node without a strategy takes its operands as they are, or
    whole. On the tensor axis a parameter is held in pieces if all readers need the same pieces,
    else whole. The loss must be I, P or S; on the context axis it may be R.
    """
    return _Sharding(graph, assignment, n, axis, apart).graph()


def stored(graph: Graph, assignment: Assignment, axis: str = "tensor") -> dict[fx.Node, Placement]:
    """How ranks hold the parameters, buffers and inputs: the type of each placeholder."""
    if axis == "context":
        return {node: R for node in graph.fx_graph.nodes if node.op == "placeholder"}
    placements = {}
    for node in graph.fx_graph.nodes:
        if node.op == "placeholder":
            types = {
                placement
                for user in node.users
                if user in assignment
                for operand, placement in zip(
                    call_of(user, graph).operands, assignment[user].inputs, strict=True
                )
                if operand.node is node
            }
            pieces = len(types) == 1 and next(iter(types)).kind == "S"
            whole = I if node.name in graph.differentiable else R
            placements[node] = next(iter(types)) if pieces and node.name in graph.by_node else whole
    return placements


class _Sharding(Rewriting):
    """The rewriting of one graph, node by node."""

    def __init__(self, graph: Graph, assignment: Assignment, n: int, axis: str, apart: int) -> None:
        super().__init__(graph)
        self.assignment = assignment
        self.n = n
        self.axis = axis
        self.apart = apart
        self.rows = rows_of(graph, axis)
        self.own_axis = {} if axis == "tensor" else {"axis": axis}  # an argument of the runtime
        self.effects = effects_of(graph)
        self.home, self.outside = _layers(graph)
        self.types: dict[fx.Node, Types] = {}
        self.converted: dict[tuple[Any, ...], fx.Node] = {}
        self.parameters: dict[str, Parameter] = {}
        self.pieces: dict[tuple[Any, ...], torch.Tensor] = {}
        # Values whose memory order on a rank may differ from the whole graph's: views of them by
        # sizes may be impossible.
        self.reordered: set[fx.Node] = set()
        self.shared = frozenset(graph.vocabulary.nodes) if graph.vocabulary else frozenset()

    def graph(self) -> Graph:
        """The sharded graph."""
        placements = stored(self.whole, self.assignment, self.axis)
        for node in self.whole.fx_graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, placements[node])
            elif node in self.shared:
                self._shared(node)
            elif node.op == "call_function":
                self._node(node)
        loss = self.whole.loss
        carries = loss.name in self.whole.differentiable
        self.nodes[loss] = self._converted(loss, I, loss, carries=carries)
        self.copy(self.whole.fx_graph.output_node())
        known = (f"{x.name}: {self.assignment[x]}\n" for x in self.nodes if x in self.assignment)
        return self.rewritten(
            f"{self.n}{self.own_axis or ''}{''.join(known)}",
            parameters=tuple(self.parameters[item.name] for item in self.whole.parameters),
            vocabulary=self._vocabulary(),
        )

    def _vocabulary(self) -> VocabularyLayers | None:
        """The layers that all ranks share, with the nodes of this graph."""
        whole = self.whole.vocabulary
        if whole is None:
            return None
        by_name = {node.name: node for node in self.made.nodes}
        lookups = (dataclasses.replace(x, node=by_name[x.node.name]) for x in whole.lookups)
        head = whole.head
        if head is not None:
            node = self.nodes[head.node]
            x = node.args[0]
            assert isinstance(x, fx.Node)
            head = dataclasses.replace(head, node=node, x=x)
        return VocabularyLayers(tuple(lookups), head)

    def _placeholder(self, node: fx.Node, placement: Placement) -> None:
        """A parameter, buffer or input."""
        self._record(node, self.made.placeholder(node.name), (placement,))
        item = self.whole.by_node.get(node.name)
        if item is not None:
            if placement.kind == "S":
                item = _local_parameter(item, placement, self.n)
            self.parameters[item.name] = item

    def _node(self, node: fx.Node) -> None:
        """Rewrite a call: convert its operands as the strategy needs them, then add the rank's
        call."""
        call = call_of(node, self.whole)
        if call.is_item and call.results:
            self._item(node, call)
            return
        strategy = self.assignment.get(node) or self._default(node, call)
        updated = set(mutated_operands(node))
        reordered = strategy.special not in ("", OWN_ORDER) and not _is_ordered(node)
        local: list[fx.Node] = []
        for operand, placement, carries in zip(
            call.operands, strategy.inputs, call.gradients, strict=True
        ):
            value = self.nodes[operand.node]
            if len(self.types[operand.node]) == 1:
                value = self._converted(operand.node, placement, node, carries=carries)
            if value is self.nodes[operand.node]:
                reordered = reordered or operand.node in self.reordered
            else:
                reordered = reordered or not _is_ordered(operand.node)
            if operand.node in updated and value is not self.nodes[operand.node]:
                value = self._copied(operand.node, value)
            if strategy.special == OWN_ORDER and operand.argument == "values":
                value = self._first(value, strategy.outputs[0], node)
            local.append(value)
        made = self._call(node, call, strategy, local)
        if reordered and call.base not in ORDERED:
            self.reordered.add(node)
            if node.target is torch.ops.aten.view.default and not self._is_updated(node):
                made.target = torch.ops.aten.reshape.default  # which copies where it must
        self._record(node, made, strategy.outputs)
        for changed in updated:
            self._forget(changed, node)
        # Every stage can take pieces of a whole value by itself, so early ones cost nothing.
        is_whole = all(placement.is_whole for placement in strategy.outputs)
        if node in self.outside and (is_whole or node.name in self.carrying):
            self._convert_early(node)

    def _first(self, numbers: fx.Node, placement: Placement, user: fx.Node) -> fx.Node:
        """Cut the numbers of all rows to the number of a rank's rows."""
        (size,) = local_shape(shape_of(user), placement, self.n)
        meta = place(user) | {"val": resized(numbers.meta["val"], (size,))}
        args, name = (numbers, 0, 0, size), f"{user.name}_numbers"
        return self.insert(name, torch.ops.aten.slice.Tensor, args, meta, carries=False)

    def _shared(self, node: fx.Node) -> None:
        """A layer of the vocabulary, which all ranks of the plane share: whole in, whole out."""
        operands = {
            operand: self._converted(operand, I, node, carries=True)
            if operand.op == "call_function"
            else self.nodes[operand]
            for operand in node.all_input_nodes
        }
        args = fx.map_arg(node.args, operands.__getitem__)
        assert callable(node.target)
        self._record(node, self.made.call_function(node.target, args), (I,))
        if node in self.outside:
            self._convert_early(node)

    def _item(self, node: fx.Node, call: NodeCall) -> None:
        """One of several results, converted if its strategy has another type."""
        of, index = node.args
        assert isinstance(of, fx.Node)
        assert isinstance(index, int)
        made = self.made.call_function(operator.getitem, (self.nodes[of], index))
        types = self.types[of]
        self._record(node, made, (types[index if len(types) > 1 else 0],))
        strategy = self.assignment.get(node)
        if strategy is not None and strategy.inputs != self.types[node]:
            made = self._converted(node, strategy.inputs[0], node, carries=any(call.gradients))
            self._replace(node, made, strategy.inputs)

    def _convert_early(self, node: fx.Node) -> None:
        """Convert a value that other layers read where it is made, if all readers need the same."""
        elsewhere = any(self.home.get(user) != self.home[node] for user in node.users)
        is_one = isinstance(node.meta["val"], torch.Tensor) and not self._is_updated(node)
        if not elsewhere or not is_one or (need := self._common_need(node)) is None:
            return
        target, carries = need
        # Values that each layer uses for its part of the work fan out there, as in Megatron-LM.
        if target.kind == "S" or not self.types[node][0].is_whole:
            made = self._converted(node, target, node, carries=carries)
            self._replace(node, made, (target,))

    def _replace(self, node: fx.Node, converted: fx.Node, types: Types) -> None:
        """Use a conversion in place of a value from now on."""
        if converted is not self.nodes[node] and not _is_ordered(node):
            self.reordered.add(node)
        self.nodes[node], self.types[node] = converted, types

    def _is_updated(self, node: fx.Node) -> bool:
        """Whether the memory of a value is updated in place."""
        return self.effects.root(node) in self.effects.writers

    def _common_need(self, node: fx.Node) -> tuple[Placement, bool] | None:
        """The type that all readers of a node need, and whether a gradient comes back; None if they
        differ, or one has no strategy."""
        needs: set[tuple[Placement, bool]] = set()
        for user in node.users:
            strategy = self.assignment.get(user)
            if strategy is None:
                return None
            call = call_of(user, self.whole)
            operands = zip(call.operands, strategy.inputs, call.gradients, strict=True)
            needs |= {(placement, c) for operand, placement, c in operands if operand.node is node}
        return needs.pop() if len(needs) == 1 else None

    def _default(self, node: fx.Node, call: NodeCall) -> Strategy:
        """The strategy of a node that has none: its operands as they are, else whole."""
        known = strategies(node, self.n, differentiable=self.whole.differentiable, rows=self.rows)
        current = [self.types[operand.node] for operand in call.operands]
        for strategy in known:
            pairs = zip(current, strategy.inputs, strict=True)
            if all(types == (wanted,) for types, wanted in pairs):
                return strategy
        return known[0]

    def _call(
        self, node: fx.Node, call: NodeCall, strategy: Strategy, local: Sequence[fx.Node]
    ) -> fx.Node:
        """The rank's call for a node."""
        values = call.filled(local, lambda item: fx.map_arg(item, self.nodes.__getitem__))
        arguments = localized(values, strategy.sizes, lambda whole: local_size(whole, self.n))
        if strategy.special not in ("", OWN_ORDER):
            other = special_call(strategy, call, arguments, self.n)
            kwargs = {**other.kwargs, **self.own_axis}
            made = self.made.call_function(other.target, other.args, kwargs)
            if other.collectives:
                inside, apart = other.collectives, self.apart
                inside = dataclasses.replace(inside, apart=apart, axis=self.axis)
                made.meta = {"exchange": inside}
        else:
            args, kwargs = call.passed(arguments)
            made = self.made.create_node(node.op, node.target, args, kwargs, node.name)
        made.meta = {**node.meta, **made.meta}
        self._share_exchange(node, strategy, made)
        self._draw_own(call, strategy, made)
        if strategy.factor != 1.0:
            made = self._scaled(node, made, strategy)
        return made

    def _share_exchange(self, node: fx.Node, strategy: Strategy, made: fx.Node) -> None:
        """Reduce an exchange along another axis to the rank's piece."""
        before = node.meta.get("exchange")
        if before is None or made.meta["exchange"] is not before or not strategy.outputs:
            return
        if strategy.outputs[0].kind == "S":
            forward, backward = (
                tuple((action, nbytes / self.n) for action, nbytes in actions)
                for actions in (before.forward, before.backward)
            )
            shared = dataclasses.replace(before, forward=forward, backward=backward)
            made.meta["exchange"] = shared

    def _draw_own(self, call: NodeCall, strategy: Strategy, made: fx.Node) -> None:
        """Let each rank draw the random numbers of its own piece."""
        if strategy.draws != "own" or not is_random(call.node):
            return
        attends = "attention" in call.name  # it draws for scores, whose rows are those of queries
        placement = strategy.inputs[0] if attends else strategy.outputs[0]
        if placement.kind != "S":
            return
        shard = shard_of(placement, call.shapes[0][placement.dim])
        sizes = None if shard.even(self.n) and len(shard.sizes) == 1 else shard.sizes
        contexts = made.meta.get("contexts", ())
        context = ("own_draws", placement.dim, sizes, self.axis, shard.zigzag)
        made.meta["contexts"] = (*contexts, context)

    def _scaled(self, node: fx.Node, made: fx.Node, strategy: Strategy) -> fx.Node:
        """The result times a factor."""
        self._describe(made, node, strategy.outputs)
        made.name = unique(f"{node.name}_of_piece", self.taken)
        if node.name in self.whole.differentiable:
            self.carrying.add(made.name)
        scaled = self.made.call_function(torch.ops.aten.mul.Tensor, (made, strategy.factor))
        scaled.meta = dict(node.meta)
        return scaled

    def _record(self, node: fx.Node, made: fx.Node, types: Types) -> fx.Node:
        """Note the replacement of a node of the whole."""
        self.types[node] = types
        self._describe(self.keep(node, made), node, types)
        return made

    def _describe(self, made: fx.Node, node: fx.Node, types: Types) -> None:
        """Give a node the shapes on rank 0."""
        whole = node.meta.get("val")
        if isinstance(whole, torch.Tensor):  # as nearly all are
            made.meta["val"] = self._piece(whole, types[0] if types else R)
        else:
            made.meta["val"] = self._pieces(whole, types)
        if self.axis != "tensor":  # its pieces have one size: local shapes suffice
            made.meta["rows"] = types
            return
        made.meta["placements"] = types
        if any(placement.kind == "S" for placement in types):
            made.meta["whole"] = whole

    def _pieces(self, values: Any, types: Types) -> Any:
        """Several results, with the tensors as on rank 0."""
        remaining = iter(types)

        def local(leaf: Any) -> Any:
            return self._piece(leaf, next(remaining, R)) if isinstance(leaf, torch.Tensor) else leaf

        return pytree.tree_map(local, values)

    def _piece(self, value: torch.Tensor, placement: Placement) -> torch.Tensor:
        """A tensor without data as on rank 0, cached for all layers, as making it is slow."""
        if placement.kind != "S":
            return value
        key = value.shape, value.stride(), value.dtype, value.device, type(value), placement
        if key not in self.pieces:
            shape = local_shape(tuple(value.shape), placement, self.n)
            self.pieces[key] = resized(value, shape)
        return self.pieces[key]

    def _converted(
        self, node: fx.Node, target: Placement, user: fx.Node, *, carries: bool
    ) -> fx.Node:
        """A value converted as `user` needs it; shared by all users in one layer."""
        (source,) = self.types[node]
        made = self.nodes[node]
        carries = carries and made.name in self.carrying
        if is_same(source, target, carries=carries):  # its size may be unknown
            return made
        key = node, target, carries, self.home[user]
        if key in self.converted:
            return self.converted[key]
        shape, nbytes, ranks = shape_of(node), nbytes_of(node), (self.n, self.apart, self.axis)
        call, args, kwargs, collectives = conversion_call(
            source, target, shape, nbytes, *ranks, carries=carries
        )
        meta, name = place(user, node) | {"exchange": collectives}, f"{node.name}_{call.name}"
        kwargs = {**kwargs, **self.own_axis}
        converted = self.insert(name, call, (made, *args), meta, carries=carries, kwargs=kwargs)
        self._describe(converted, node, (target,))
        self.converted[key] = converted
        return converted

    def _copied(self, node: fx.Node, converted: fx.Node) -> fx.Node:
        """A copy that may be updated in place."""
        assert self.effects.root(node) is node, f"{node.name} is a view, updated as another type"
        assert node.op != "placeholder", f"{node.name} is updated as another type"
        meta = {k: v for k, v in converted.meta.items() if k != "exchange"}
        clone, carries = torch.ops.aten.clone.default, converted.name in self.carrying
        return self.insert(f"{converted.name}_copy", clone, (converted,), meta, carries=carries)

    def _forget(self, updated: fx.Node, by: fx.Node) -> None:
        """Drop the conversions of a value that has been updated in place."""
        root = self.effects.root(updated)
        self.converted = {
            key: made for key, made in self.converted.items() if self.effects.root(key[0]) != root
        }
        returned = self.effects.root(by) is root  # statistics are updated and not returned
        if returned and self.types[updated] != self.types[by] and len(self.types[by]) == 1:
            self.nodes[updated], self.types[updated] = self.nodes[by], self.types[by]


def _is_ordered(node: fx.Node) -> bool:
    """Whether a value is contiguous; True if its sizes are not known."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in value.shape):
        return True
    return value.is_contiguous()


def _layers(graph: Graph) -> tuple[dict[fx.Node, int], set[fx.Node]]:
    """The number of the layer, or of the run of nodes between layers, that each node is in; and the
    nodes that are in no layer."""
    nodes = [node for node in graph.fx_graph.nodes if node.op == "call_function"]
    home, outside = {}, set()
    for number, (layer, members) in enumerate(itertools.groupby(nodes, layer_of(nodes))):
        for node in members:
            home[node] = number
            if not layer.path:
                outside.add(node)
    return home, outside


def _local_parameter(item: Parameter, placement: Placement, n: int) -> Parameter:
    """A tensor of the model as the piece of one of `n` ranks."""
    shard = shard_of(placement, item.shape[placement.dim])
    shape = list(item.shape)
    # Segments are always split evenly, whole dimensions not.
    parts = [local_size(size, n) for size in shard.sizes]
    shape[placement.dim] = parts[0] if len(parts) == 1 else sum(parts)
    return dataclasses.replace(item, shape=tuple(shape), shard=shard)
