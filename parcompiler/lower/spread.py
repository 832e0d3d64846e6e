"""The layers of the vocabulary once the blocks are on stages: who uses them, what they read."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from parcompiler.graph import EmbeddingLookup, VocabularyHead
from parcompiler.lower.lowered import Spread, SpreadHead, SpreadLookup
from parcompiler.lower.stages import Division


def spread(division: Division, method: str) -> Spread | None:
    """The layers on all ranks; None when every layer is on a stage."""
    found = division.graph.vocabulary
    if found is None:
        return None
    sizes = dict(_sizes(division, found.lookups, found.head))
    return Spread(
        method=method,
        lookups=tuple(_lookup(division, item) for item in found.lookups),
        head=_head(division, found.head) if found.head else None,
        tensors=tuple(sizes),
        sizes=tuple(sizes.values()),
    )


def _lookup(division: Division, item: EmbeddingLookup) -> SpreadLookup:
    """A lookup with the stage that uses it: its users are in one block."""
    (stage,) = {division.stage_of[user] for user in item.node.users if user in division.stage_of}
    return SpreadLookup(
        value=division.variables[item.node],
        lookup=item,
        stage=stage,
        inputs=tuple(_inputs(division, item.indices)),
    )


def _head(division: Division, item: VocabularyHead) -> SpreadHead:
    """The head with the stage that gives what it takes."""
    return SpreadHead(
        value=division.variables[item.x],
        head=item,
        stage=division.stage_of[item.x],
        inputs=tuple(_inputs(division, item.targets)),
    )


def _inputs(division: Division, computed: fx.Graph) -> Iterator[str]:
    """The tensors of the batch that a small graph reads."""
    nodes = {node.name: node for node in division.graph.fx_graph.nodes if node.op == "placeholder"}
    for node in computed.nodes:
        if node.op == "placeholder" and node.name in division.graph.input_nodes:
            yield division.variables[nodes[node.name]]


def _sizes(
    division: Division, lookups: tuple[EmbeddingLookup, ...], head: VocabularyHead | None
) -> Iterator[tuple[str, int]]:
    """The tensors that are held in rows, each with the size of its vocabulary."""
    by_name = division.graph.by_name
    for item in lookups:
        yield item.weight, by_name[item.weight].shape[0]
    if head is not None:
        size = by_name[head.weight].shape[0]
        yield head.weight, size
        yield from ((name, size) for name in (head.bias, head.class_weight) if name)
