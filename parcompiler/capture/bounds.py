"""The bound of an integer input: the rows of tables that it indexes, or the number of classes.

Indices beyond the rows of their table are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from parcompiler.capture.clean import where
from parcompiler.capture.effects import arguments_of, effects_of, is_random, name_of, outside
from parcompiler.capture.functions import Applied
from parcompiler.capture.inputs import flat
from parcompiler.capture.prologue import cone, evaluated
from parcompiler.errors import InputError
from parcompiler.graph import Graph, shape_of

_PASS_ON = frozenset(
    "view reshape to slice contiguous pad flatten unsqueeze squeeze clone alias transpose expand "
    "select permute t unbind split split_with_sizes chunk getitem".split()
)
_CLASSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd")
_TABLES = ("embedding", "embedding_bag", "_embedding_bag")
_LARGEST = 1 << 25  # elements of all tensors computed to check an index: 256 MiB of integers
# For each operator: the operand that indexes, the table that it indexes, and in which dimension.
_INDEX = {"embedding": (1, 0, 0)} | dict.fromkeys(_CLASSES, (1, 0, 1))


def high(node: fx.Node) -> int | None:
    """The smallest bound that the operators which read `node` set; None when none is known."""
    bounds: list[int] = []
    pending, seen = [node], {node}
    while pending:
        item = pending.pop()
        for user in item.users:
            name = name_of(user)
            if name in _INDEX:
                index, table, dim = _INDEX[name]
                if len(user.args) > index and user.args[index] is item:
                    indexed = user.args[table]
                    assert isinstance(indexed, fx.Node)
                    shape = shape_of(indexed)  # the logits of one example have classes alone
                    bounds.append(shape[min(dim, len(shape) - 1)])
            elif name in _PASS_ON and user not in seen:
                seen.add(user)
                pending.append(user)
    return min(bounds, default=None)


def high_of_example(tensor: torch.Tensor) -> int | None:
    """One more than the largest value of an example batch; None when it has no values."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta or not tensor.numel():
        return None
    return max(int(tensor.max()) + 1, 1)


def check_tables(graph: Graph) -> None:
    """Refuse indices without a row in their table, where they follow from constants and from the
    inputs that the model was captured on."""
    examples = dict(flat(graph.sample))
    values = {item.node: examples[item.key] for item in graph.inputs}
    buffers = (item for item in graph.parameters if item.buffer and not item.mutated)
    values |= {item.node: graph.tensors[item.name] for item in buffers}
    for node in graph.fx_graph.nodes:
        if name_of(node) in _TABLES:
            arguments = arguments_of(node)
            _check_rows(
                graph, node, arguments["weight"], _computed(graph, arguments["indices"], values)
            )


def _check_rows(graph: Graph, node: fx.Node, table: fx.Node, index: torch.Tensor | None) -> None:
    """Refuse an index below zero or beyond the rows of a table."""
    rows = shape_of(table)[0]
    if index is not None and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < rows:
        known = graph.by_node.get(table.name)
        message = (
            f"{table.name if known is None else known.name} has {rows} rows (0 to {rows - 1}), and "
            f"is asked for rows {int(index.min())} to {int(index.max())}: give shorter inputs or "
            f"smaller indices, or more rows; {where(node)}"
        )
        raise InputError(message)


def _computed(graph: Graph, node: fx.Node, values: Mapping[str, Any]) -> torch.Tensor | None:
    """The value of a node if it follows from `values` of placeholders, by name; else None, also if
    it has no data, is random or is large."""
    members = cone(node, effects_of(graph))
    order = [item for item in graph.fx_graph.nodes if item in members]
    known: dict[fx.Node, Any] = {}
    for leaf in outside(order) if members else (node,):
        value = values.get(leaf.name)
        if not isinstance(value, torch.Tensor) or value.is_meta:
            return None
        known[leaf] = value.to("cpu", copy=True)  # it may be updated
    shapes = [getattr(item.meta.get("val"), "shape", ()) for item in order]
    if any(is_random(item) or isinstance(item.target, Applied) for item in order):
        return None
    if sum(map(math.prod, shapes)) > _LARGEST:
        return None

    try:
        value = evaluated(node, order, known)
    except Exception:  # an operator may raise anything on another device
        return None
    assert isinstance(value, torch.Tensor)
    return value
