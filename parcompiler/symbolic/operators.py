"""The operators whose arguments are sizes, and how those of a node may be read."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from parcompiler.spmd.call import bound
from parcompiler.symbolic.reading import (
    Reading,
    Shape,
    fixed,
    readings,
    readings_of_end,
    readings_of_list,
    readings_of_view,
)
from parcompiler.symbolic.sizes import Sizes

Choice = Mapping[str, Reading | tuple[Reading, ...]]  # by argument

VIEWS = {"view": "size", "reshape": "shape", "_unsafe_view": "size", "view_copy": "size"}
EXPANDS = {"expand": "size", "expand_copy": "size"}
SHAPES = ("size",)  # of the operators that make a tensor
MAKERS = frozenset("empty zeros ones full rand randn new_empty new_zeros new_ones new_full".split())
RANGES = {"arange": ("start", "end"), "eye": ("n", "m"), "tril_indices": ("row", "col"),
          "triu_indices": ("row", "col")}  # fmt: skip
LAST = 2**63 - 1  # what a slice to the end says


def alternatives(
    node: fx.Node, before: Shape | None, after: Shape | None, now: Sizes, at: Sizes
) -> list[Choice]:
    """How the sizes among a node's arguments may be read, the likeliest first.

    Its first operand had the shape `before` at capture and has `after` where the symbols, `now`
    at capture, have the numbers `at`. One empty choice where there is nothing to read.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return [{}]
    name, given = _name(node), bound(node.target, node.args, node.kwargs)
    if name in MAKERS:
        rows = readings_of_list(_numbers(given["size"]), now)
        return [{"size": row} for row in rows]
    if name in RANGES:
        return _of_range(given, RANGES[name], now)
    if before is None or after is None:
        return [{}]
    if name in VIEWS:
        target = tuple(node.meta["val"].shape)
        rows = readings_of_view(before, after, target, now, at)
        return [{VIEWS[name]: row} for row in rows] or [{}]
    if name in EXPANDS:
        target = tuple(node.meta["val"].shape)
        rows = _of_expansion(before, after, target, now)
        return [{EXPANDS[name]: row} for row in rows]
    if name in ("slice", "narrow"):
        return _of_slice(name, given, before, after, now)
    if name in ("split", "topk", "unflatten"):
        return list(_of_parts(name, given, before, after, now, at))
    return [{}]


def unexplained(node: fx.Node, choice: Choice, known: Collection[int]) -> list[int]:
    """The numbers from which a node makes a tensor and that are no symbol's: a model may have
    computed them from sizes, and the graph does not say."""
    if _name(node) not in MAKERS and _name(node) not in RANGES:
        return []
    found: list[Reading] = []
    for item in choice.values():
        found += item if isinstance(item, tuple) else [item]
    numbers = (int(item.factor) for item in found if not item.letters)
    return [number for number in numbers if number > 1 and number not in known]


def with_numbers(node: fx.Node, numbers: Mapping[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """The arguments of a node with other numbers; those given by place stay there."""
    if not numbers:
        return node.args, node.kwargs
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    args = tuple(numbers.get(name, value) for name, value in zip(names, node.args, strict=False))
    placed = names[: len(args)]
    more = {name: value for name, value in numbers.items() if name not in placed}
    return args, {**node.kwargs, **more}


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "_opname", ""))


def _numbers(sizes: Sequence[Any]) -> list[int]:
    return [int(size) for size in sizes]


def _of_range(given: Mapping[str, Any], names: Sequence[str], now: Sizes) -> list[Choice]:
    """A range or a square: each of its ends."""
    ends = [name for name in names if type(given.get(name)) is int]
    each = [readings(given[name], now) for name in ends]
    rows = list(itertools.product(*each))
    return [dict(zip(ends, row, strict=True)) for row in rows]


def _of_expansion(
    before: Shape, after: Shape, target: Shape, now: Sizes
) -> list[tuple[Reading, ...]]:
    """A dimension that is there keeps its size; a new one, or one of 1, may be a symbol. That is
    less likely where another dimension has changed from the same number."""
    first = len(target) - len(before)
    changed = {old for old, new in zip(before, after, strict=True) if old != new}
    each: list[list[Reading]] = []
    for place, size in enumerate(target):
        dim = place - first
        if dim >= 0 and before[dim] == size and (size != 1 or after[dim] != 1):
            each.append([Reading(dims=(dim,))])
        else:
            found = readings(size, now)
            each.append(found[::-1] if size in changed else found)
    return list(itertools.islice(itertools.product(*each), 8))


def _of_slice(
    name: str, given: Mapping[str, Any], before: Shape, after: Shape, now: Sizes
) -> list[Choice]:
    """Where a slice begins and ends; one to the end of its dimension does so at any size."""
    dim = given.get("dim", 0) % len(before)
    start, size = given.get("start") or 0, before[dim]
    if type(start) is not int:
        return [{}]
    if name == "narrow":
        length = given["length"]
        ends = readings_of_end(length, size, after[dim], dim, now)
        whole = [Reading(dims=(dim,))] if start == 0 and length == size else ends
        return [{"length": end} for end in whole]
    end = given.get("end")
    if end is None or (type(end) is int and end >= size):
        choice: Choice = {"end": fixed(LAST)}
        if start <= 0 or start < size:
            return [choice]
        return [{"end": fixed(LAST), "start": item} for item in readings(start, now)]
    if type(end) is not int or end <= 0:
        return [{}]
    return [{"end": item} for item in readings_of_end(end, size, after[dim], dim, now)]


def _of_parts(
    name: str, given: Mapping[str, Any], before: Shape, after: Shape, now: Sizes, at: Sizes
) -> Iterator[Choice]:
    """Parts of a dimension that changes: as many as there were, or as long as they were."""
    argument = {"split": "split_size", "topk": "k", "unflatten": "sizes"}[name]
    dim = given.get("dim", -1 if name == "topk" else 0) % len(before)
    number = given.get(argument)
    if name == "unflatten":
        target = _resolved(_numbers(given["sizes"]), before[dim])
        rows = readings_of_view((before[dim],), (after[dim],), target, now, at)
        moved = [tuple(_on(reading, dim) for reading in row) for row in rows]
        yield from ({"sizes": row} for row in moved)
        return
    if type(number) is int and before[dim] != after[dim]:
        part = Reading(factor=fixed(number).factor / before[dim], dims=(dim,))
        yield from ({argument: part}, {argument: fixed(number)})
        return
    yield {}


def _resolved(sizes: Sequence[int], whole: int) -> Shape:
    """Sizes without the -1 that stands for what is left."""
    product = 1
    for size in sizes:
        product *= size if size != -1 else 1
    return tuple(whole // max(1, product) if size == -1 else size for size in sizes)


def _on(reading: Reading, dim: int) -> Reading:
    """A reading of the only dimension as one of dimension `dim`."""
    return Reading(reading.factor, (dim,) * len(reading.dims), reading.letters, reading.offset)
