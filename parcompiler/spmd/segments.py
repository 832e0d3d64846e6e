"""Splits of a dimension within its segments, for nodes that split or concatenate it.

rows of a fused projection   q q q q k k k k v v v v
on rank 0 of 2               q q     k k     v v        split -> q q, k k, v v
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from torch import fx

from parcompiler.spmd.call import NodeCall, read
from parcompiler.spmd.placement import R, S
from parcompiler.spmd.strategy import SizeArgument, Strategy
from parcompiler.spmd.views import SIZE_ARGUMENTS

VIEWS = frozenset((*SIZE_ARGUMENTS, "flatten"))
Segments = tuple[int, ...]
_SPLITS = ("split", "split_with_sizes", "chunk", "tensor_split")
_JOINS = ("cat", "concat", "concatenate")


def segmentations(nodes: Iterable[fx.Node], axis: str = "tensor") -> tuple[Segments, ...]:
    """The divisions of dimensions made by some nodes, for `strategies` to try.

    Slices count when those of one value make up a whole dimension. On the context axis rows of a
    batch that are flattened into one dimension are segments of it.
    """
    divisions: dict[Segments, None] = {}
    cuts: dict[tuple[fx.Node, int], set[int]] = {}
    for node in nodes:
        if node.op != "call_function":
            continue
        call = read(node)
        if call.base in _SPLITS and call.is_plain and len(call.operands) == 1:
            divisions[_parts(call)] = None
        elif axis == "context" and call.is_plain and (merged := _merged(call)):
            divisions[merged] = None
        elif call.base == "slice" and call.is_plain:
            dim, start, end = _taken(call)
            bounds = {start, end, 0, call.shapes[0][dim]}
            cuts.setdefault((call.operands[0].node, dim), set()).update(bounds)
    for bounds in cuts.values():
        edges = sorted(bounds)
        divisions[tuple(b - a for a, b in itertools.pairwise(edges))] = None
    return tuple(division for division in divisions if len(division) > 1)


def segment_strategies(call: NodeCall, n: int, segments: Sequence[Segments]) -> Iterator[Strategy]:
    """The strategies of split, chunk, slice and cat that split the dimension they work along."""
    divisible = [division for division in segments if all(part % n == 0 for part in division)]
    if call.base in _SPLITS:
        yield from _split(call, n, divisible)
    elif call.base in _JOINS:
        yield from _cat(call, divisible)
    elif call.base == "slice":
        yield from _slice(call, divisible)
    elif (merged := _merged(call)) in divisible:
        yield from _flattened(call, merged)


def _merged(call: NodeCall) -> Segments:
    """For a view that flattens [samples, rows, ...] or back, the segments of the flat dimension,
    one for each sample; () for other calls.

    [4, 16, 8] -> [64, 8]    16, 16, 16, 16
    """
    if call.base not in VIEWS or len(call.operands) != 1 or len(call.results) != 1:
        return ()
    apart, joined = sorted((call.shapes[0], call.result_shapes[0]), key=len, reverse=True)
    if not len(apart) > len(joined) > 0 or 1 in apart[:2] or joined[0] != apart[0] * apart[1]:
        return ()
    return (apart[1],) * apart[0]


def _flattened(call: NodeCall, merged: Segments) -> Iterator[Strategy]:
    """A view that flattens rows of several samples, or back."""
    (before,), (after,) = call.shapes, call.result_shapes
    joins = len(before) > len(after)
    inputs, outputs = (S(1),), (S(0, merged),)
    argument, dim = SIZE_ARGUMENTS.get(call.base), 0 if joins else 1
    sizes: tuple[SizeArgument, ...] = ()
    if argument and argument != "sizes":
        listed = call.arguments[argument]
        if listed[dim] != -1:
            sizes = (SizeArgument(argument, dim, after[dim]),)
    elif argument:
        return
    yield Strategy(*((inputs, outputs) if joins else (outputs, inputs)), sizes)


def _dim(call: NodeCall) -> int:
    return int(call.arguments.get("dim", 0)) % len(call.shapes[0])


def _parts(call: NodeCall) -> Segments:
    """The sizes of the results of a split, along its dimension."""
    return tuple(shape[_dim(call)] for shape in call.result_shapes)


def _split(call: NodeCall, n: int, segments: Sequence[Segments]) -> Iterator[Strategy]:
    """A split whose parts are the segments of its operand."""
    parts, dim = _parts(call), _dim(call)
    if parts not in segments or "tensor_split" in call.name:
        return
    if "chunk" in call.name and len(set(parts)) > 1:
        return
    sizes: list[SizeArgument] = []
    for argument in ("split_size", "split_sizes"):
        value = call.arguments.get(argument)
        if isinstance(value, int):
            sizes.append(SizeArgument(argument, None, value))
        elif value is not None:
            sizes += [SizeArgument(argument, place, size) for place, size in enumerate(value)]
    if all(size.whole % n == 0 for size in sizes):
        yield Strategy((S(dim, parts),), (S(dim),) * len(parts), tuple(sizes))


def _cat(call: NodeCall, segments: Sequence[Segments]) -> Iterator[Strategy]:
    """Parts that become segments."""
    rank, dim = len(call.result_shapes[0]), _dim(call)
    if any(len(shape) != rank for shape in call.shapes):
        return
    parts = tuple(shape[dim] for shape in call.shapes)
    if parts in segments:
        yield Strategy((S(dim),) * len(parts), (S(dim, parts),))


def _slice(call: NodeCall, segments: Sequence[Segments]) -> Iterator[Strategy]:
    """A slice that takes some of the segments of its operand."""
    dim, start, end = _taken(call)
    size = call.shapes[0][dim]
    if int(call.arguments.get("step", 1)) != 1 or end - start == size:
        return
    for division in segments:
        edges = list(itertools.accumulate((0, *division)))
        if edges[-1] != size or not {start, end} <= set(edges):
            continue
        within = division[edges.index(start) : edges.index(end)]
        sizes = [SizeArgument("start", None, start)] if start else []
        is_named = call.arguments.get("end") == end
        sizes += [SizeArgument("end", None, end)] if is_named else []
        if is_named or end == size:
            result = S(dim, within if len(within) > 1 else ()) if within else R
            yield Strategy((S(dim, division),), (result,), tuple(sizes))


def _taken(call: NodeCall) -> tuple[int, int, int]:
    """The dimension of a slice, and the first and last element of it, as positive numbers."""
    dim = _dim(call)
    size, taken = call.shapes[0][dim], call.result_shapes[0][dim]
    start = call.arguments.get("start") or 0
    start = min(max(start + size if start < 0 else start, 0), size)
    return dim, start, start + taken
