"""A captured graph run node by node in float64, its vocabulary layers by their specification."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from parcompiler.capture import capture
from parcompiler.capture.clean import simplify
from parcompiler.capture.lift import lift
from parcompiler.graph import Graph
from parcompiler.vocabulary import find, spread
from tests import architectures, zoo
from tests.vocabulary import specification


@cache
def graph(name: str) -> tuple[Graph, Mapping[str, Tensor]]:
    """A tiny model in float64, without dropout, and its micro-batch by placeholder."""
    made = zoo.build(name) if name in zoo.ALL else architectures.build(name)
    model, inputs, *loss = made
    return lifted(capture(model.eval(), inputs, *loss), inputs)


def lifted(graph: Graph, inputs: Mapping[str, Any]) -> tuple[Graph, Mapping[str, Tensor]]:
    """A graph and its micro-batch in float64."""
    found = simplify(lift(graph, torch.float64))
    tensors = {name: _double(value) for name, value in found.tensors.items()}
    batch = {item.node: _double(inputs[item.key]) for item in found.inputs}
    return dataclasses.replace(found, tensors=tensors), batch


def everything(graph: Graph, ranks: int = 2) -> Graph:
    """The graph with all spread that can be."""
    found = find(graph, ranks)
    head = {found.head.weight} if found.head else set()
    return spread(graph, {*found.tables, *head}, ranks)


def run(graph: Graph, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss, and the gradient of each trainable parameter by its name."""
    given = {name: value.clone() for name, value in batch.items()}
    for item in graph.parameters:
        given[item.node] = graph.tensors[item.name].detach().clone()
        given[item.node].requires_grad_(item.trainable)
    values: dict[fx.Node, Any] = {}
    for node in graph.fx_graph.nodes:
        if node.op == "placeholder":
            values[node] = given[node.name]
        elif node.op == "call_function":
            values[node] = _of_node(graph, node, values, given)
            _check(node, values[node])
    loss = values[graph.loss]
    loss.backward()
    names = [item for item in graph.parameters if item.trainable]
    return loss.detach(), {item.name: given[item.node].grad for item in names}


def of_vocabulary(
    graph: Graph, node: fx.Node, values: Mapping[fx.Node, Any], given: Mapping[str, Tensor]
) -> Tensor:
    """A layer of the vocabulary by its specification; `given` are placeholders by their names."""

    def tensor(name: str | None) -> Any:
        return None if name is None else given[graph.by_name[name].node]

    assert graph.vocabulary is not None
    for item in graph.vocabulary.lookups:
        if item.node is node:
            return specification.lookup(item, tensor(item.weight), given)
    head = graph.vocabulary.head
    assert head is not None
    tensors = tensor(head.bias), tensor(head.class_weight)
    return specification.head(head, values[head.x], tensor(head.weight), given, *tensors)


def _of_node(
    graph: Graph, node: fx.Node, values: Mapping[fx.Node, Any], given: Mapping[str, Tensor]
) -> Any:
    """One node: by its target, or a layer of the vocabulary."""
    if graph.vocabulary is not None and node in graph.vocabulary.nodes:
        return of_vocabulary(graph, node, values, given)
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    assert callable(node.target)
    graded = ("no_grad",) not in node.meta.get("contexts", ())
    with torch.set_grad_enabled(graded):
        return node.target(*args, **kwargs)


def _check(node: fx.Node, value: Any) -> None:
    """What is recorded of a value must be so."""
    recorded = node.meta["val"]
    if isinstance(recorded, Tensor):
        sizes = zip(recorded.shape, value.shape, strict=True)
        assert all(said == size for said, size in sizes if isinstance(said, int)), node
        assert recorded.dtype == value.dtype, node


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
