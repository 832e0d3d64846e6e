"""A whole graph on simulated ranks: every rank computes with what its strategies say it holds.

All ranks run in one process and one autograd graph. A conversion is a function of what all ranks
hold, whose backward is what the table of conversions says, so that a wrong type anywhere shows in
the loss or in a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from parcompiler.graph import Graph
from parcompiler.passes.shard import Assignment
from parcompiler.spmd import I, Placement
from parcompiler.spmd.call import NodeCall, read
from parcompiler.spmd.conversions import conversion
from parcompiler.spmd.placement import join, take
from parcompiler.spmd.shard import stored
from parcompiler.spmd.simulate import run
from tests.spmd.special_ranks import run_special
from tests.vocabulary.running import of_vocabulary

Parts = list[torch.Tensor]  # what each rank holds
Outcome = tuple[torch.Tensor, dict[str, torch.Tensor]]  # the loss, and gradients by name


def whole(graph: Graph, batch: Mapping[str, torch.Tensor]) -> Outcome:
    """The loss and all gradients of the graph as it is."""
    leaves = {item.node: _leaf(graph, item.name) for item in graph.parameters}
    values: dict[fx.Node, Any] = {}
    for node in graph.fx_graph.nodes:
        if node.op == "placeholder":
            values[node] = leaves[node.name] if node.name in leaves else batch[node.name]
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            with _contexts(node):
                values[node] = node.target(*args, **kwargs)
    loss = values[graph.loss]
    trained = {item.name: leaves[item.node] for item in graph.parameters if item.trainable}
    gradients = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
    return loss.detach(), dict(zip(trained, gradients, strict=True))


def sharded(
    graph: Graph, assignment: Assignment, n: int, batch: Mapping[str, torch.Tensor]
) -> Outcome:
    """The same, computed by `n` ranks. Fails where ranks disagree about what they all hold."""
    held = stored(graph, assignment)
    ranks = _Ranks(graph, assignment, n)
    leaves: dict[str, Parts] = {}
    for node in graph.fx_graph.nodes:
        if node.op == "placeholder":
            item = graph.by_node.get(node.name)
            value = batch[node.name] if item is None else _leaf(graph, item.name).detach()
            parts = _dealt(value, held[node], n)
            if item is not None and item.trainable:
                leaves[item.name] = [part.requires_grad_() for part in parts]
            ranks.hold(node, [parts], (held[node],))
        elif graph.vocabulary is not None and node in graph.vocabulary.nodes:
            ranks.run_shared(node)
        elif node.op == "call_function":
            ranks.run(node)
    losses = ranks.operand(graph.loss, 0, I, flows=True)
    flat = [part for parts in leaves.values() for part in parts]
    found = torch.autograd.grad(
        losses, flat, [torch.ones_like(loss) for loss in losses], materialize_grads=True
    )
    gradients = {}
    for place, name in enumerate(leaves):
        parts = list(found[place * n : (place + 1) * n])
        node = next(x for x in held if x.name == graph.by_name[name].node)
        gradients[name] = _put_together(parts, held[node])
    return _put_together([loss.detach() for loss in losses], I), gradients


class _Ranks:
    """What every rank holds of every value."""

    def __init__(self, graph: Graph, assignment: Assignment, n: int) -> None:
        self.graph, self.assignment, self.n = graph, assignment, n
        self.values: dict[fx.Node, list[Any]] = {}  # by rank
        self.types: dict[fx.Node, tuple[Placement, ...]] = {}
        self.converted: dict[tuple[Any, ...], Parts] = {}

    def hold(self, node: fx.Node, results: Sequence[Parts], types: tuple[Placement, ...]) -> None:
        self.values[node], self.types[node] = list(results[0]), types

    def operand(self, node: fx.Node, result: int, wanted: Placement, *, flows: bool) -> Parts:
        """A value as a type, converted once."""
        values = self.values[node]
        given = self.types[node][result]
        if not isinstance(values[0], torch.Tensor):
            values = [[v for v in value if isinstance(v, torch.Tensor)][result] for value in values]
        if given == wanted or (given.is_whole and wanted.is_whole and not flows):
            return values
        key = node, result, wanted, flows
        if key not in self.converted:
            self.converted[key] = convert(values, given, wanted, differentiable=flows)
        return self.converted[key]

    def run_shared(self, node: fx.Node) -> None:
        """A layer of the vocabulary: whole on every rank, of the whole."""
        calls = [item for item in node.all_input_nodes if item.op == "call_function"]
        own = [self.operand(item, 0, I, flows=True) for item in calls]
        self.values[node] = []
        for rank in range(self.n):
            given = {
                item.name: parts[rank]
                for item, parts in self.values.items()
                if item.op == "placeholder"
            }
            values = {item: parts[rank] for item, parts in zip(calls, own, strict=True)}
            self.values[node].append(of_vocabulary(self.graph, node, values, given))
        self.types[node] = (I,)

    def run(self, node: fx.Node) -> None:
        call, strategy = read(node, self.graph.differentiable), self.assignment[node]
        if call.is_item:
            of, index = node.args
            assert strategy.inputs == strategy.outputs
            assert isinstance(of, fx.Node)
            self.values[node] = [value[index] for value in self.values[of]]
            self.types[node] = strategy.outputs
            return
        seen: dict[Any, int] = {}
        operands = []
        for operand, wanted, gradient in zip(
            call.operands, strategy.inputs, call.gradients, strict=True
        ):
            key = operand.node, operand.argument, operand.index
            result = seen.get(key, 0)
            seen[key] = result + 1
            flows = gradient and operand.node.name in self.graph.differentiable
            operands.append(self.operand(operand.node, result, wanted, flows=flows))
        with _contexts(node):
            if strategy.special == "classes":
                self.values[node] = _on_classes(call, operands)
            elif not call.operands and not call.results:
                self.values[node] = [run(call, [])] * self.n
            else:
                local = _Filled(call, self.values)
                compute = run_special if strategy.special else run
                self.values[node] = [
                    compute(local.on(rank), [x[rank] for x in operands], strategy, (self.n, rank))
                    for rank in range(self.n)
                ]
        self.types[node] = strategy.outputs


class _Filled:
    """A call with the values of operands that are no tensors: sizes that a graph computes."""

    def __init__(self, call: NodeCall, values: Mapping[fx.Node, list[Any]]) -> None:
        self.call, self.values = call, values
        self.known = {operand.node for operand in call.operands}

    def on(self, rank: int) -> NodeCall:
        def fill(node: fx.Node) -> Any:
            return node if node in self.known else self.values[node][rank]

        arguments = {k: fx.map_arg(v, fill) for k, v in self.call.arguments.items()}
        call = self.call
        return NodeCall(
            call.node, call.name, call.overload, arguments, call.operands, call.results,
            call.carries,
        )  # fmt: skip


def convert(parts: Parts, source: Placement, target: Placement, *, differentiable: bool) -> Parts:
    """What ranks hold after a conversion; the gradient comes back as the table says."""
    row = conversion(source, target, differentiable=differentiable)
    assert row is not None, f"{source} -> {target}"
    apply: Any = _Convert.apply
    return list(apply(source, target, row.forward, row.backward, *parts))


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Any, target: Any, action: str, backward: str, *parts: Any) -> Any:
        ctx.row = source, target, backward
        ctx.shape = _put_together(parts, source, check=False).shape
        return tuple(_act(action, list(parts), source, target, ctx.shape))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        source, target, action = ctx.row
        found = _act(action, list(gradients), target, source, ctx.shape)
        return None, None, None, None, *found


def _act(action: str, parts: Parts, here: Placement, there: Placement, shape: Any) -> Parts:
    """One action on what all ranks hold; `here` and `there` say which pieces."""
    n = len(parts)
    if action == "nothing":
        return [part.clone() for part in parts]
    if action == "take":
        return [take(part, there, n, rank).clone() for rank, part in enumerate(parts)]
    if action == "first":
        return [part.clone() if rank == 0 else torch.zeros_like(part)
                for rank, part in enumerate(parts)]  # fmt: skip
    if action == "pad":
        nothing = [torch.zeros_like(part) for part in parts]
        return [join([*nothing[:rank], part, *nothing[rank + 1 :]], here)
                for rank, part in enumerate(parts)]  # fmt: skip
    total = torch.stack(parts).sum(0) if action in ("all-reduce", "reduce-scatter") else None
    if total is None:
        total = join(parts, here)
    if action in ("all-reduce", "all-gather"):
        return [total.clone() for _ in parts]
    return [take(total, there, n, rank).clone() for rank in range(n)]


def _on_classes(call: NodeCall, operands: Sequence[Parts]) -> Parts:
    """The loss when each rank has the logits of some classes."""
    logits, *others = operands
    rest = {k: v for k, v in call.arguments.items() if not isinstance(v, fx.Node)}
    weight = others[1][0] if len(others) > 1 else None
    apply: Any = _Classes.apply
    return list(apply(others[0][0], weight, rest, *logits))


class _Classes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, target: Any, weight: Any, rest: Any, *logits: Any) -> Any:
        with torch.enable_grad():
            ctx.logits = torch.cat(logits, 1).detach().requires_grad_()
            ctx.loss = F.cross_entropy(
                ctx.logits, target, weight, ignore_index=rest["ignore_index"],
                reduction=("none", "mean", "sum")[rest["reduction"]],
                label_smoothing=rest["label_smoothing"],
            )  # fmt: skip
        ctx.sizes = [part.shape[1] for part in logits]
        return tuple(ctx.loss.detach().clone() for _ in logits)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (found,) = torch.autograd.grad(ctx.loss, ctx.logits)
        pieces = found.split(ctx.sizes, 1)
        return None, None, None, *(g * p for g, p in zip(gradients, pieces, strict=True))


def _leaf(graph: Graph, name: str) -> torch.Tensor:
    value = graph.tensors[name].detach().clone()
    return value.requires_grad_(graph.by_name[name].trainable)


def _dealt(value: torch.Tensor, placement: Placement, n: int) -> Parts:
    if placement.kind == "S":
        return [take(value, placement, n, rank).clone() for rank in range(n)]
    return [value.clone() for _ in range(n)]


def _put_together(
    parts: Sequence[torch.Tensor], placement: Placement, *, check: bool = True
) -> torch.Tensor:
    if placement.kind == "S":
        return join(parts, placement)
    if check:
        for part in parts:
            torch.testing.assert_close(part, parts[0], rtol=1e-9, atol=1e-12)
    return parts[0]


def _contexts(node: fx.Node) -> ExitStack:
    """The modes that a node was captured under."""
    stack = ExitStack()
    for context in node.meta.get("contexts", ()):
        if context[0] == "no_grad":
            stack.enter_context(torch.no_grad())
        elif context[0] == "enable_grad":
            stack.enter_context(torch.enable_grad())
    return stack
