"""Batch invariance: whether the loss of a step is the same for micro-batches of other sizes.

The loss of a step is the mean of the losses of its micro-batches. Half as many micro-batches with
twice the rows give the same loss if that of a micro-batch is a mean over rows, with a summand from
each row by itself. This is followed from node to node, in a graph and in its copy for twice the
rows, as if the halves of the latter were on two ranks:

    S(d)     rows are dimension d               tokens, activations, the loss of each token
    MEAN     a mean over rows                   mean(S), cross_entropy(S, S), 0.1 * MEAN
    FIXED    does not depend on rows            parameters, positions
    None     anything else                      sum(S), MEAN * MEAN, S - MEAN, softmax over rows

An operator leaves rows by themselves if two ranks may split it along them (`spmd.strategies`), and
its arguments on a rank are those for half of the rows. Not detected are targets that a criterion
ignores, if micro-batches have different numbers of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from parcompiler.capture.effects import overload_name
from parcompiler.graph import Graph, tensors_of
from parcompiler.spmd import Placement, strategies
from parcompiler.spmd.call import NodeCall, read
from parcompiler.spmd.placement import P, R, S
from parcompiler.spmd.rules import MAKERS, written_rule
from parcompiler.spmd.segments import Segments, segmentations
from parcompiler.spmd.strategy import localized
from parcompiler.spmd.views import RULES as VIEWS

AFFINE = frozenset("add add_ sub sub_ rsub".split())
LINEAR = frozenset(
    "neg mean sum _to_copy to clone alias detach detach_ lift_fresh_copy contiguous view reshape "
    "squeeze unsqueeze expand permute transpose t select slice float double type_as".split()
)
WEIGHTED = frozenset("cross_entropy_loss nll_loss nll_loss_nd nll_loss2d".split())  # by class
MEAN_OF_CRITERIA = 1  # the argument `reduction` of an operator
FIXED, MEAN = R, P
HALVES = 2


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """The numbers 0, 1, 2, ... of the rows, along a dimension."""

    dim: int


# How a result of a node depends on the rows: S(d), MEAN, FIXED; None stands for anything else.
Dependence = Placement | RowNumbers | None
Known = Mapping[fx.Node, tuple[Dependence, ...]]


def batch_dependence(graph: Graph, other: Graph) -> str | None:
    """Why the loss of a step may depend on the rows of its micro-batches; None: it does not.

    `other` is the graph for twice the rows, with nodes of the same names.
    """
    for item in graph.parameters:
        if item.mutated:
            return f"{item.name!r} is updated by each micro-batch"
    nodes, twins = ({node.name: node for node in x.fx_graph.nodes} for x in (other, graph))
    strangers = [name for name in (*twins, *nodes) if name not in nodes or name not in twins]
    if strangers:
        return f"other rows are computed by other operators ({strangers[0]!r})"
    changed = {item.node for item in graph.parameters if not _is_equal(graph, other, item.name)}
    known: dict[fx.Node, tuple[Dependence, ...]] = {}
    segments = segmentations(other.fx_graph.nodes, "context")
    for node in other.fx_graph.nodes:
        if node.op == "call_function":
            known[node] = _dependence(node, twins[node.name], known, segments)
        elif node.op != "output":
            values = (tensors_of(one.meta.get("val")) for one in (node, twins[node.name]))
            fixed = None if node.name in changed else FIXED
            pairs = zip(*values, strict=True)
            known[node] = tuple(fixed if a.shape == b.shape else S(0) for a, b in pairs)
    if known[other.loss] in ((MEAN,), (FIXED,)):
        return None
    first = other.loss  # becomes the first node of no known dependence on a way to the loss
    while unknown := [operand for operand in first.all_input_nodes if None in known[operand]]:
        first = unknown[0]
    return f"the loss may be no mean over rows ({first.name!r})"


def _is_equal(graph: Graph, other: Graph, name: str) -> bool:
    """Whether a tensor of the model is the same for other rows: constants of a forward may differ,
    and are unknown on the meta device."""
    one, two = graph.tensors.get(name), other.tensors.get(name)
    if one is two or one is None or two is None:
        return one is two
    return one.shape == two.shape and (one.is_meta or torch.equal(one, two))


def _dependence(
    node: fx.Node, twin: fx.Node, known: Known, segments: Sequence[Segments]
) -> tuple[Dependence, ...]:
    """How the results of a node depend on the rows; `twin` is the node for half of the rows, and
    `segments` are divisions of dimensions that consist of rows several times."""
    call = read(node, ())
    operands = [_of_operand(call, place, known) for place in range(len(call.operands))]
    nothing: tuple[Dependence, ...] = (None,) * len(call.results)
    if None in operands:
        return nothing
    if any(isinstance(x, RowNumbers) for x in operands):
        return _of_numbers(call, twin, operands, segments)
    if call.base in MAKERS:  # which read no values
        operands = [FIXED] * len(operands)
    shapes = [x.shape for x in tensors_of(twin.meta.get("val"))]
    if all(x in (FIXED, MEAN) for x in operands) and [x.shape for x in call.results] == shapes:
        if not _is_same(call.arguments, twin) or (MEAN in operands and not _is_linear(node, known)):
            return nothing
        return (MEAN if MEAN in operands else FIXED,) * len(call.results)
    if _numbers_rows(call, twin):
        return (RowNumbers(0),)
    return _split(call, twin, operands, segments) or nothing


def _split(
    call: NodeCall, twin: fx.Node, operands: Sequence[Dependence], segments: Sequence[Segments]
) -> tuple[Placement, ...]:
    """How the results depend on the rows of a call that computes each row by itself, or the mean
    over them; nothing for other calls."""
    for strategy in strategies(call.node, HALVES, differentiable=(), segments=segments):
        if strategy.inputs == tuple(operands) and strategy.outputs:
            arguments = localized(call.arguments, strategy.sizes, lambda size: size // HALVES)
            if _is_same(arguments, twin):
                if all(x.kind == "S" for x in strategy.outputs) and not strategy.special:
                    return strategy.outputs
                if strategy.outputs == (MEAN,) and strategy.factor * HALVES == 1:
                    return (MEAN,)
    rows_first = S(0) in operands and all(x in (FIXED, S(0)) for x in operands)
    return (MEAN,) if rows_first and _is_criterion(call) else ()


def _numbers_rows(call: NodeCall, twin: fx.Node) -> bool:
    """Whether a call makes the numbers of the rows: `torch.arange(len(x))`."""
    end = call.arguments.get("end")
    if call.base != "arange" or not isinstance(end, int) or call.result_shapes != ((end,),):
        return False
    return not call.arguments.get("start") and _is_same(
        {**call.arguments, "end": end // HALVES}, twin
    )


def _of_numbers(
    call: NodeCall, twin: fx.Node, operands: Sequence[Dependence], segments: Sequence[Segments]
) -> tuple[Dependence, ...]:
    """How the results of a call on the numbers of rows depend on the rows: `x[numbers, ...]` takes
    of each row something by itself."""
    split = [S(x.dim) if isinstance(x, RowNumbers) else x for x in operands]
    if call.base in VIEWS:
        results = _split(call, twin, split, segments)
        if len(results) == 1 and results[0].kind == "S" and not results[0].segments:
            return (RowNumbers(results[0].dim),)
    elif call.base == "index" and operands[0] == S(0) and call.arguments["indices"][0] is not None:
        if [k for k, x in enumerate(operands) if isinstance(x, RowNumbers)] == [1]:
            slices = _split(call, twin, [FIXED, *split[1:]], segments)
            if slices:
                return slices
    return (None,) * len(call.results)


def _of_operand(call: NodeCall, place: int, known: Known) -> Dependence:
    """The dependence of an operand, which may be one of several results of a node."""
    operand = call.operands[place]
    results = known[operand.node]
    if call.is_item:
        index = call.arguments["1"]
        return results[index] if isinstance(index, int) and index < len(results) else None
    same = [k for k, item in enumerate(call.operands) if item.node is operand.node]
    return results[same.index(place) % len(results)]


def _is_same(arguments: Mapping[str, Any], twin: fx.Node) -> bool:
    """Whether a call has the arguments of another graph's node; nodes are the same by name."""

    def named(value: Any) -> Any:
        return pytree.tree_map(lambda x: ("node", x.name) if isinstance(x, fx.Node) else x, value)

    return bool(named(dict(arguments)) == named(dict(read(twin, ()).arguments)))


def _is_criterion(call: NodeCall) -> bool:
    """Whether an operator is a criterion that takes the mean over its rows, and whose rules do not
    say so."""
    if call.arguments.get("reduction") != MEAN_OF_CRITERIA:
        return False
    if call.base in WEIGHTED:
        return call.arguments.get("weight") is None
    return written_rule(call) is None


def _is_linear(node: fx.Node, known: Known) -> bool:
    """Whether the result of an operator is a mean over rows if an operand is one."""
    name = overload_name(node)
    means = [MEAN in known[item] for item in node.args if isinstance(item, fx.Node)]
    if name in ("mul", "mul_"):
        return sum(means) == 1
    if name in ("div", "div_"):
        return means == [True] or means == [True, False]
    return name in LINEAR or name in AFFINE
