"""Functions under `torch.vmap`, written as the operators on whole batches that they run.

An export keeps the calls of the transform, and within them operators on single examples. Such a
region is traced once more, below the transform, and its nodes are exchanged:

    _vmap_increment_nesting(2, 'error')           ┐
    one = _add_batch_dim(rows, 0, 1)              │
    sum = aten.add.Tensor(one, table)             ├─►   add = aten.add.Tensor(rows, unsqueeze)
    all = _remove_batch_dim(sum, 1, 2, 0)         │
    _vmap_decrement_nesting()                     ┘

A trace below the transform is also below autograd. It equals what autograd records of the region
unless the region handles gradients itself: one with a custom Function, another transform or another
gradient mode stays, and is refused. So is one with dropout or a training norm, whose operators
would no longer have a mode that an evaluation could change.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from parcompiler.capture.effects import MODES, arguments_of

_INDEX = "torch._dynamo._trace_wrapped_higher_order_op.ModIndex"  # tensor[i] in a mask


def write_batches(graph: fx.Graph, owner: torch.nn.Module) -> None:
    """Exchange the regions of `torch.vmap` in `graph` that can be written without it."""
    for region in list(_regions(graph)):
        inside = set(region)
        operands = dict.fromkeys(
            operand for node in region for operand in node.all_input_nodes if operand not in inside
        )
        tensors = [node for node in operands if node.op != "get_attr"]
        values = [node.meta.get("val") for node in tensors]
        fakes = [value for value in values if isinstance(value, FakeTensor)]
        if fakes and len(fakes) == len(values) and all(map(_is_plain, region)):
            results = [node for node in region if not inside.issuperset(node.users)]
            _exchange(graph, region, tensors, results, _traced(owner, region, operands, results))


def _regions(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The nodes between an outermost call of `torch.vmap` and its end."""
    depth, region = 0, []
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        depth += name == "_vmap_increment_nesting"
        if depth:
            region.append(node)
        if name == "_vmap_decrement_nesting":
            depth -= 1
            if not depth:
                yield region
                region = []


def _is_plain(node: fx.Node) -> bool:
    """Whether a node of a region is an operator, or belongs to the transform or an index."""
    name = getattr(node.target, "__name__", "")
    if isinstance(node.target, torch._ops.OpOverload):
        arguments = arguments_of(node)
        return node.target.namespace == "aten" and not any(map(arguments.get, MODES))
    if name == "flat_apply":  # a Function: only this one has no gradient of its own
        return _INDEX in node.args
    return node.op == "get_attr" or node.target is operator.getitem or name in _OF_VMAP


_OF_VMAP = frozenset(
    "_vmap_increment_nesting _vmap_decrement_nesting _add_batch_dim _remove_batch_dim "
    "lazy_load_decompositions".split()
)


def _traced(
    owner: torch.nn.Module, region: list[fx.Node], operands: Any, results: list[fx.Node]
) -> fx.Graph:
    """The graph of a region below the transform, with a placeholder for each tensor among its
    operands."""
    body, copies = fx.Graph(), {}
    for node in operands:
        is_object = node.op == "get_attr"
        copies[node] = body.node_copy(node) if is_object else body.placeholder(node.name)
        copies[node].meta = {**node.meta}
    for node in region:
        copies[node] = body.node_copy(node, copies.__getitem__)
    body.output(tuple(copies[node] for node in results))
    fakes = [node.meta["val"] for node in operands if node.op != "get_attr"]
    run = fx.Interpreter(fx.GraphModule(owner, body)).run
    with warnings.catch_warnings(), preserve_node_meta(), fakes[0].fake_mode:
        warnings.simplefilter("ignore")  # an operator without a rule for batches runs in a loop
        # Given any table, torch 2.14 keeps `detach`, which it would otherwise write as `alias`.
        return make_fx(run, decomposition_table={})(*fakes).graph


def _exchange(
    graph: fx.Graph,
    region: list[fx.Node],
    tensors: list[fx.Node],
    results: list[fx.Node],
    batched: fx.Graph,
) -> None:
    """Put the nodes of `batched` in the place of a region, with `tensors` for its placeholders."""
    if any(node.op == "get_attr" for node in batched.nodes):
        return  # a constant made in the region has no name in the model
    remaining, values = iter(tensors), {}
    with graph.inserting_before(region[0]):
        for node in batched.nodes:
            if node.op == "placeholder":
                values[node] = next(remaining)
            elif node.op == "call_function":
                values[node] = graph.node_copy(node, values.__getitem__)
    made: Any = batched.output_node().args[0]
    for old, new in zip(results, made, strict=True):
        old.replace_all_uses_with(values[new])
    for node in reversed(region):
        graph.erase_node(node)
