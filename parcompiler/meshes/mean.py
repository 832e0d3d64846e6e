"""Whether a step has the same loss whatever its micro-batches: is it a mean over their rows?

The loss of a step is the mean over its micro-batches of each one's own. Twice the rows in half as
many micro-batches give the same where that of a micro-batch is a mean over its rows, of what each
row gives by itself. From node to node:

    ROWS     has a dimension of rows            tokens, activations, the loss of each token
    MEAN     a mean over rows                   mean(ROWS), cross_entropy(ROWS, ROWS), 0.1 * MEAN
    FIXED    knows of no rows                   parameters, positions
    None     something else                     sum(ROWS), MEAN * MEAN, ROWS - MEAN

A dimension of rows shows in a copy of the graph for other rows. An operator that mixes rows and
keeps them all (a softmax over the batch) is not found out, nor targets that a criterion ignores, of
which one micro-batch may have more than another.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

import torch
from torch import fx

from parcompiler.cost.stand_in import tensors
from parcompiler.graph import Graph
from parcompiler.spmd.call import bound

AFFINE = frozenset("add add_ sub sub_ rsub".split())
LINEAR = frozenset(
    "neg mean sum _to_copy to clone alias detach contiguous view reshape squeeze unsqueeze expand "
    "permute transpose t select slice float double type_as".split()
)
WEIGHTED = (
    "cross_entropy_loss",
    "nll_loss",
    "nll_loss_nd",
    "nll_loss2d",
)  # by class
MEAN_OF_CRITERIA = 1  # the argument `reduction` of an operator


class Kind(Enum):
    """What a node yields; None stands for all else."""

    ROWS = auto()
    MEAN = auto()
    FIXED = auto()


def differs(graph: Graph, other: Graph) -> str | None:
    """Why the loss of a step may follow the rows of its micro-batches; None: it does not.

    `other` is the graph for other rows, with nodes of the same names.
    """
    for item in graph.parameters:
        if item.mutated:
            return f"{item.name!r} is updated by each micro-batch"
    twins = {node.name: node for node in other.fx_graph.nodes}
    kinds: dict[fx.Node, Kind | None] = {}
    for node in graph.fx_graph.nodes:
        if node.op != "output":
            kinds[node] = _kind(node, kinds, rows=_has_rows(node, twins[node.name]))
    if kinds[graph.loss] in (Kind.MEAN, Kind.FIXED):
        return None
    first = _origin(graph.loss, kinds)
    return f"the loss may be no mean over rows ({first.name!r})"


def _kind(node: fx.Node, kinds: Mapping[fx.Node, Kind | None], *, rows: bool) -> Kind | None:
    """What a node yields; `rows` says that it has them."""
    read = {kinds[operand] for operand in node.all_input_nodes}
    if None in read or (rows and Kind.MEAN in read):
        return None
    if rows:
        return Kind.ROWS
    if Kind.ROWS in read:
        return Kind.MEAN if _is_mean(node) and Kind.MEAN not in read else None
    if Kind.MEAN in read:
        return Kind.MEAN if _is_linear(node, kinds) else None
    return Kind.FIXED


def _is_mean(node: fx.Node) -> bool:
    """Whether an operator takes the mean of what it reads."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name, given = _name(node), bound(node.target, node.args, node.kwargs)
    if name in WEIGHTED and given.get("weight") is not None:
        return False
    return name == "mean" or given.get("reduction") == MEAN_OF_CRITERIA


def _is_linear(node: fx.Node, kinds: Mapping[fx.Node, Kind | None]) -> bool:
    """Whether an operator yields a mean over rows if it reads one."""
    name = _name(node)
    means = [kinds[item] is Kind.MEAN for item in node.args if isinstance(item, fx.Node)]
    if name in ("mul", "mul_"):
        return sum(means) == 1
    if name in ("div", "div_"):
        return means == [True] or means == [True, False]
    return name in LINEAR or name in AFFINE


def _origin(loss: fx.Node, kinds: Mapping[fx.Node, Kind | None]) -> fx.Node:
    """Where what is not known begins, on a way to the loss."""
    node = loss
    while True:
        before = [operand for operand in node.all_input_nodes if kinds[operand] is None]
        if not before:
            return node
        node = before[0]


def _has_rows(node: fx.Node, other: fx.Node) -> bool:
    """Whether the value of a node has another shape than for other rows."""
    values = zip(tensors(node.meta.get("val")), tensors(other.meta.get("val")), strict=True)
    return any(first.shape != second.shape for first, second in values)


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "_opname", ""))
