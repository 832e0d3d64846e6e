"""Rows dealt zigzag to context ranks: those of causal attention, where later rows cost more.

    rows of attention    0 ── 1 ── 2 ── 3 ── 4 ── 5 ── 6 ── 7        chunks, as dealt to 4 ranks
    on rank              0    1    2    3    3    2    1    0

A rank has a chunk from either end, so that all ranks attend to equally many keys (Llama 3, arXiv
2407.21783, section 3.3.2). Other computations do not depend on which rows a rank has.

>>> from parcompiler.spmd.placement import R, S
>>> linear, shapes = Strategy((S(1), R), (S(1),)), ((2, 16, 4), (4, 4), (2, 16, 4))
>>> print(zigzag(linear, shapes, Rows(frozenset({16})), 4))
S(1 zigzag) R -> S(1 zigzag)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from parcompiler.graph import Graph
from parcompiler.spmd.call import Shape, read
from parcompiler.spmd.strategy import Strategy


@dataclass(frozen=True, slots=True)
class SortedNode:
    """A node with rows of `tokens` tokens, sorted or not, which each rank sorts for itself (see
    `sorting`). In its `strategy`, `S(0)` are pieces as the tokens are dealt."""

    strategy: Strategy
    tokens: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Facts about a graph's rows: the lengths of the sequences that are dealt zigzag, and the nodes
    that compute with rows in each rank's own order."""

    causal: frozenset[int]
    sorting: Mapping[fx.Node, SortedNode] = field(default_factory=dict)


def causal_lengths(graph: Graph) -> Iterator[int]:
    """The lengths of the sequences that attend causally to themselves, without a mask tensor."""
    for node in graph.fx_graph.nodes:
        if getattr(node.target, "_opname", "") == "scaled_dot_product_attention":
            call = read(node)
            if call.arguments.get("is_causal") and call.is_plain:
                queries, keys = (shape[-2] for shape in call.shapes[:2])
                if queries == keys:
                    yield queries


def is_zigzag(size: int, rows: Rows | None, n: int) -> bool:
    """Whether a sequence of `size` is dealt zigzag to `n` ranks."""
    return rows is not None and size in rows.causal and size % (2 * n) == 0


def zigzag(strategy: Strategy, shapes: Sequence[Shape], rows: Rows, n: int) -> Strategy | None:
    """A strategy with its rows dealt zigzag to `n` ranks; `shapes` are those of operands and
    results. None if only some of them have such rows, as their pieces would differ."""
    split = [(t, s) for t, s in zip(strategy.types, shapes, strict=True) if t.kind == "S"]
    zigzags = {
        all(is_zigzag(size, rows, n) for size in t.segments or (shape[t.dim],))
        for t, shape in split
    }
    if zigzags != {True}:
        return strategy if len(zigzags) < 2 else None
    if strategy.special not in ("", "causal rows", "ring", "own rows"):  # heads like rows
        return None
    return strategy.placed(replace(t, zigzag=True) if t.kind == "S" else t for t in strategy.types)


def sorted_by_ranks(
    item: SortedNode,
    shapes: Sequence[Shape],
    divisions: Iterable[Sequence[int]],
    rows: Rows,
    n: int,
) -> Iterator[Strategy]:
    """The strategies of a node between rows that each of `n` ranks sorts: one for each way in which
    the tokens are dealt. `divisions` are segments of dimensions; `shapes` as for `zigzag`."""
    for division in [d for d in divisions if sum(d) == item.tokens] or [()]:
        lengths = set(division or (item.tokens,))
        if any(length % n for length in lengths):
            continue
        is_dealt = all(is_zigzag(length, rows, n) for length in lengths)
        types = []
        for t, shape in zip(item.strategy.types, shapes, strict=True):
            each = shape[0] // item.tokens if t.kind == "S" else 1
            segments = tuple(each * part for part in division)
            types.append(t if t.dim < 0 else replace(t, segments=segments, zigzag=is_dealt))
        yield item.strategy.placed(types)
