"""How a number that the capture wrote into a node follows from sizes: of its operand, or symbols.

A capture at batch 2 and sequence 8 says `view(x, [2, 8, 4, 16])`. Read at other sizes, 2 and 8 are
those of `x`, 4 and 16 what the model made of its last dimension. Where a number may be read in
several ways the likeliest comes first; `resizable` tries the others where it does not work.

>>> first, *others = _of_view((2, 8, 64), (14, 88, 64), (2, 8, 4, 16), {}, {})
>>> [reading.at((14, 88, 64), {}) for reading in first]
[14, 88, 4, 16]
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import fx

from parcompiler.spmd.call import bound
from parcompiler.symbolic.sizes import Sizes, Unfit

Shape = tuple[int, ...]
MOST = 12  # readings of one node
NEAR = 2  # elements before the end of a dimension
LAST = 2**63 - 1  # what a slice to the end says

# Operators, and their arguments that are sizes.
VIEWS = {"view": "size", "reshape": "shape", "_unsafe_view": "size", "view_copy": "size",
         "unflatten": "sizes"}  # fmt: skip
EXPANDS = ("expand", "expand_copy")
MAKERS = "empty zeros ones full rand randn new_empty new_zeros new_ones new_full".split()
RANGES = {"arange": ("start", "end"), "eye": ("n", "m"), "tril_indices": ("row", "col"),
          "triu_indices": ("row", "col")}  # fmt: skip
PARTS = {"split": ("split_size", 0), "topk": ("k", -1)}  # and the dimension without an argument


@dataclass(frozen=True, slots=True)
class Reading:
    """factor · the sizes of some dimensions of the first operand · some symbols + offset."""

    factor: Fraction = Fraction(1)
    dims: tuple[int, ...] = ()
    letters: tuple[str, ...] = ()
    offset: int = 0

    def at(self, shape: Shape, sizes: Sizes) -> int:
        """The number for an operand of this shape. Raises Unfit where it is none."""
        number = self.factor * prod(shape[dim] for dim in self.dims) + self.offset
        number *= prod(sizes[letter] for letter in self.letters)
        if number.denominator != 1 or number < 0:
            message = f"a size of {number} is no number of elements"
            raise Unfit(message)
        return int(number)


Choice = Mapping[str, Reading | tuple[Reading, ...]]  # how the arguments of a node are read


def each(choice: Choice) -> Iterator[Reading]:
    """All readings of a choice."""
    for item in choice.values():
        yield from item if isinstance(item, tuple) else (item,)


def alternatives(
    node: fx.Node, before: Shape | None, after: Shape | None, now: Sizes, at: Sizes
) -> list[Choice]:
    """How the sizes among a node's arguments may be read, the likeliest first.

    Its first operand had the shape `before` at capture and has `after` where the symbols, `now`
    at capture, have the numbers `at`. One empty choice where there is nothing to read.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return [{}]
    name, arguments = operator_of(node), bound(node.target, node.args, node.kwargs)
    if name in MAKERS:
        shapes = itertools.product(*(_of_symbols(int(size), now) for size in arguments["size"]))
        return [{"size": row} for row in itertools.islice(shapes, MOST)]
    if name in RANGES:
        ends = [end for end in RANGES[name] if type(arguments.get(end)) is int]
        rows = itertools.product(*(_of_symbols(arguments[end], now) for end in ends))
        return [dict(zip(ends, row, strict=True)) for row in rows]
    if before is None or after is None:
        return [{}]
    if name in VIEWS:
        first, last = 0, len(node.meta["val"].shape)
        if name == "unflatten":
            first = arguments["dim"] % len(before)
            last = first + len(arguments["sizes"])
        views = _of_view(before, after, tuple(node.meta["val"].shape), now, at)
        return [{VIEWS[name]: row[first:last]} for row in views] or [{}]
    if name in EXPANDS:
        expansions = _of_expansion(before, after, tuple(node.meta["val"].shape), now)
        return [{"size": row} for row in expansions]
    if name in ("slice", "narrow"):
        return _of_slice(name, arguments, before, after, now)
    if name in PARTS:
        # Of a dimension that changes: as many parts as there were, or as long ones.
        argument, usual = PARTS[name]
        dim, number = arguments.get("dim", usual) % len(before), arguments.get(argument)
        if type(number) is int and before[dim] != after[dim]:
            part = Reading(factor=Fraction(number, before[dim]), dims=(dim,))
            return [{argument: part}, {argument: _fixed(number)}]
    return [{}]


def operator_of(node: fx.Node) -> str:
    """The name of an operator without its library and overload."""
    return str(getattr(node.target, "_opname", ""))


def unexplained(node: fx.Node, choice: Choice, known: Collection[int]) -> list[int]:
    """The numbers from which a node makes a tensor and that are no symbol's: a model may have
    computed them from sizes, and the graph does not say."""
    if operator_of(node) not in MAKERS and operator_of(node) not in RANGES:
        return []
    numbers = (int(reading.factor) for reading in each(choice) if not reading.letters)
    return [number for number in numbers if number > 1 and number not in known]


def with_numbers(node: fx.Node, numbers: Mapping[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """The arguments of a node with other numbers; those given by place stay there."""
    if not numbers:
        return node.args, node.kwargs
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    args = tuple(numbers.get(name, value) for name, value in zip(names, node.args, strict=False))
    more = {name: value for name, value in numbers.items() if name not in names[: len(args)]}
    return args, {**node.kwargs, **more}


def _fixed(number: int) -> Reading:
    """A number of the model's own."""
    return Reading(Fraction(number))


def _of_symbols(number: int, sizes: Sizes) -> list[Reading]:
    """How a number without an operand may be read: as the symbols it equals, then as itself."""
    readings = [Reading(letters=(letter,)) for letter, size in sizes.items() if size == number]
    readings += (
        Reading(letters=pair)
        for pair in itertools.combinations(sizes, 2)
        if sizes[pair[0]] * sizes[pair[1]] == number and 1 not in (sizes[x] for x in pair)
    )
    return [_fixed(number), *readings] if number == 1 else [*readings, _fixed(number)]


def _of_view(
    before: Shape, after: Shape, target: Shape, now: Sizes, at: Sizes
) -> list[tuple[Reading, ...]]:
    """How the sizes of a view may be read, of an operand that had the shape `before` at capture
    and has `after` where the symbols, `now` at capture, have the numbers `at`.

    A view keeps the order of elements: the more boundaries between dimensions stay where they
    are in both shapes, the likelier a reading; then those that have the symbols, further left.
    """
    columns = []
    for size in target:
        readings: dict[int, Reading] = {}  # the first of each number
        for reading in _of_operand(size, before, after, now):
            with suppress(Unfit):
                readings.setdefault(reading.at(after, at), reading)
        columns.append(list(readings.values()))
    changes, edges = {(now[letter], at[letter]) for letter in now}, _edges(before, after)
    ranked: list[tuple[tuple[int, ...], tuple[Reading, ...]]] = []
    for row in itertools.islice(itertools.product(*columns), 4096):
        sized = tuple(reading.at(after, at) for reading in row)
        if prod(sized) == prod(after):
            pairs = list(zip(target, sized, strict=True))
            kept = -len(edges & _edges(target, sized))
            unlikely = sum(old != new and (old, new) not in changes for old, new in pairs)
            right = sum(place for place, (old, new) in enumerate(pairs) if old != new)
            ranked.append(((kept, unlikely, right), row))
    ranked.sort(key=lambda pair: pair[0])
    return [row for rank, row in ranked if rank[0] == ranked[0][0][0]][:MOST]


def _edges(before: Shape, after: Shape) -> set[tuple[int, int]]:
    """How many elements lie before each boundary, at capture and now."""
    both = (itertools.accumulate(shape, int.__mul__) for shape in (before, after))
    return set(zip(*both, strict=True))


def _of_operand(number: int, before: Shape, after: Shape, now: Sizes) -> Iterator[Reading]:
    """How a size of a view may be read: dimensions of the operand as they are, symbols, the
    number itself, and a part or a multiple of dimensions that change."""
    pairs = itertools.combinations(range(len(before) + 1), 2)
    products = {dims: prod(before[slice(*dims)]) for dims in pairs}
    changing = [dims for dims, size in products.items() if size != prod(after[slice(*dims)])]
    yield from (Reading(dims=tuple(range(*d))) for d in changing if products[d] == number)
    if changing:
        yield from (Reading(letters=(letter,)) for letter in now if now[letter] == number)
    yield _fixed(number)
    for dims in changing:
        whole = products[dims]
        if whole and number and (number % whole == 0 or whole % number == 0):
            yield Reading(factor=Fraction(number, whole), dims=tuple(range(*dims)))


def _of_expansion(
    before: Shape, after: Shape, target: Shape, now: Sizes
) -> list[tuple[Reading, ...]]:
    """A dimension that is there keeps its size; a new one, or one of 1, may be a symbol."""
    first = len(target) - len(before)
    columns: list[list[Reading]] = []
    for place, size in enumerate(target):
        dim = place - first
        if dim >= 0 and before[dim] == size and (size != 1 or after[dim] != 1):
            columns.append([Reading(dims=(dim,))])
        else:
            columns.append(_of_symbols(size, now))
    return list(itertools.islice(itertools.product(*columns), 8))


def _of_slice(
    name: str, arguments: Mapping[str, Any], before: Shape, after: Shape, now: Sizes
) -> list[Choice]:
    """Where a slice begins and ends; one to the end of its dimension does so at any size."""
    dim = arguments.get("dim", 0) % len(before)
    start, size = arguments.get("start") or 0, before[dim]
    if type(start) is not int:
        return [{}]

    def ends(number: int) -> list[Reading]:
        """Of an end: near that of the dimension it may be counted from there."""
        readings = _of_symbols(number, now)
        if size != after[dim] and size - number <= NEAR:
            readings.append(Reading(dims=(dim,), offset=number - size))
        return readings

    if name == "narrow":
        length = arguments["length"]
        whole = start == 0 and length == size
        return [{"length": end} for end in ([Reading(dims=(dim,))] if whole else ends(length))]
    end = arguments.get("end")
    if end is None or (type(end) is int and end >= size):
        last: Choice = {"end": _fixed(LAST)}
        late = start >= size and start > 0
        return [{**last, "start": item} for item in _of_symbols(start, now)] if late else [last]
    if type(end) is not int or end <= 0:
        return [{}]
    return [{"end": item} for item in ends(end)]
