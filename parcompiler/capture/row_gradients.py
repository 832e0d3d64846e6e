"""Row gradients, for tables of which a step looks up few rows, if the model asks for them.

    nn.Embedding(10_000_000, 64, sparse=True)      a step of 65,536 lookups
    gradient of all rows     10,000,000 x 64       summed over data ranks, read by the optimizer
    gradient of rows             65,536 x 64       and their indices: torch's sparse layout

An optimizer that leaves rows without a gradient unchanged makes the same step with both. Data ranks
gather each other's rows, so that a table keeps a whole gradient where a step looks up more rows
than it has. (As recommenders are trained: Naumov et al. 2019, arXiv 1906.00091, section 4.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import fx

from parcompiler.capture.effects import arguments_of
from parcompiler.capture.rewriting import copied
from parcompiler.graph import Graph


def with_row_gradients(graph: Graph, microbatches: int) -> Graph:
    """`graph` with gradients of rows for the tables that are looked up with sparse=True, if a step
    with `microbatches` in all (of all data ranks) looks up at most as many rows as there are."""
    return graph.once(("rows", microbatches), lambda: _with_row_gradients(graph, microbatches))


def _with_row_gradients(graph: Graph, microbatches: int) -> Graph:
    """Uncached body of `with_row_gradients`."""
    tables = {
        name: (node, rows)
        for name, node, rows in _lookups(graph)
        if rows * microbatches <= graph.by_name[name].shape[0]
    }
    if not tables:
        return graph
    copies = copied(graph)
    for node, _ in tables.values():
        _ask_for_rows(copies.nodes[node])
    parameters = tuple(
        dataclasses.replace(item, looked_up=tables[item.name][1] * microbatches)
        if item.name in tables
        else item
        for item in graph.parameters
    )
    return copies.rewritten(f"rows of {sorted(tables)}", parameters=parameters)


def _ask_for_rows(node: fx.Node) -> None:
    """Call a lookup with sparse=True."""
    names = list(arguments_of(node))[: len(node.args)]
    node.args = tuple(
        True if name == "sparse" else x for name, x in zip(names, node.args, strict=True)
    )
    if "sparse" not in names:
        node.kwargs = {**node.kwargs, "sparse": True}


def _lookups(graph: Graph) -> Iterator[tuple[str, fx.Node, int]]:
    """The tables that may have row gradients, read by one marked lookup only: name, lookup, and the
    rows that it looks up in a micro-batch."""
    for node in graph.fx_graph.nodes:
        if "sparse" not in node.meta:
            continue
        operands = arguments_of(node)
        weight = operands["weight"]
        item = graph.by_node.get(weight.name)
        plain = not operands.get("scale_grad_by_freq") and operands.get("max_norm") is None
        if item is None or not item.trainable or item.name in graph.hooks or item.aliases:
            continue
        if plain and [*weight.users] == [node]:
            yield item.name, node, operands["indices"].meta["val"].numel()
