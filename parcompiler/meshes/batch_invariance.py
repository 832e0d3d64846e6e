"""Batch invariance: whether the loss of a step is the same for micro-batches of other sizes.

The loss of a step is the mean of the losses of its micro-batches. Half as many micro-batches with
twice the rows give the same loss if that of a micro-batch is a mean over rows, with a summand from
each row by itself. This is followed from node to node:

    ROWS     has a dimension of rows            tokens, activations, the loss of each token
    MEAN     a mean over rows                   mean(ROWS), cross_entropy(ROWS, ROWS), 0.1 * MEAN
    FIXED    does not depend on rows            parameters, positions
    None     anything else                      sum(ROWS), MEAN * MEAN, ROWS - MEAN

A dimension of rows is one that differs in a copy of the graph for another number of rows. Not
detected are operators that mix rows but keep their number (a softmax over the batch), and targets
that a criterion ignores, if micro-batches have different numbers of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

import torch
from torch import fx

from parcompiler.capture.effects import arguments_of, overload_name
from parcompiler.graph import Graph, tensors_of

AFFINE = frozenset("add add_ sub sub_ rsub".split())
LINEAR = frozenset(
    "neg mean sum _to_copy to clone alias detach contiguous view reshape squeeze unsqueeze expand "
    "permute transpose t select slice float double type_as".split()
)
WEIGHTED = frozenset("cross_entropy_loss nll_loss nll_loss_nd nll_loss2d".split())  # by class
MEAN_OF_CRITERIA = 1  # the argument `reduction` of an operator


class Dependence(Enum):
    """How the value of a node depends on the rows; None stands for anything else."""

    ROWS = auto()
    MEAN = auto()
    FIXED = auto()


def batch_dependence(graph: Graph, other: Graph) -> str | None:
    """Why the loss of a step may depend on the rows of its micro-batches; None: it does not.

    `other` is the graph for other rows, with nodes of the same names.
    """
    for item in graph.parameters:
        if item.mutated:
            return f"{item.name!r} is updated by each micro-batch"
    twins = {node.name: node for node in other.fx_graph.nodes}
    known: dict[fx.Node, Dependence | None] = {}
    for node in graph.fx_graph.nodes:
        if node.name not in twins:
            return f"other rows are computed by other operators ({node.name!r})"
        if node.op != "output":
            values = (tensors_of(one.meta.get("val")) for one in (node, twins[node.name]))
            rows = any(one.shape != two.shape for one, two in zip(*values, strict=True))
            known[node] = _dependence(node, known, rows=rows)
    if known[graph.loss] in (Dependence.MEAN, Dependence.FIXED):
        return None
    first = graph.loss  # becomes the first node of no known dependence on a way to the loss
    while unknown := [operand for operand in first.all_input_nodes if known[operand] is None]:
        first = unknown[0]
    return f"the loss may be no mean over rows ({first.name!r})"


def _dependence(
    node: fx.Node, known: Mapping[fx.Node, Dependence | None], *, rows: bool
) -> Dependence | None:
    """How a node depends on the rows; `rows` says that its value has them."""
    operands = {known[operand] for operand in node.all_input_nodes}
    if None in operands or (rows and Dependence.MEAN in operands):
        return None
    if rows:
        return Dependence.ROWS
    if Dependence.ROWS in operands:
        mean = _is_mean(node) and Dependence.MEAN not in operands
        return Dependence.MEAN if mean else None
    if Dependence.MEAN in operands:
        return Dependence.MEAN if _is_linear(node, known) else None
    return Dependence.FIXED


def _is_mean(node: fx.Node) -> bool:
    """Whether an operator takes the mean of its operands."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name, arguments = overload_name(node), arguments_of(node)
    if name in WEIGHTED and arguments.get("weight") is not None:
        return False
    return name == "mean" or arguments.get("reduction") == MEAN_OF_CRITERIA


def _is_linear(node: fx.Node, known: Mapping[fx.Node, Dependence | None]) -> bool:
    """Whether the result of an operator is a mean over rows if an operand is one."""
    name = overload_name(node)
    means = [known[item] is Dependence.MEAN for item in node.args if isinstance(item, fx.Node)]
    if name in ("mul", "mul_"):
        return sum(means) == 1
    if name in ("div", "div_"):
        return means == [True] or means == [True, False]
    return name in LINEAR or name in AFFINE
