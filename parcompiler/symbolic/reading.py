"""How a number that the capture burnt into a node follows from sizes: of its operand, or symbols.

A capture at batch 2 and sequence 8 says `view(x, [2, 8, 4, 16])`. Read at other sizes, 2 and 8 are
those of `x`, 4 and 16 what the model made of its last dimension. Where a number may be read in
several ways the likeliest comes first; `resize` tries the others where it does not work.

>>> first, *others = readings_of_view((2, 8, 64), (14, 88, 64), (2, 8, 4, 16), {}, {})
>>> [reading.at((14, 88, 64), {}) for reading in first]
[14, 88, 4, 16]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from parcompiler.symbolic.sizes import Sizes

Shape = tuple[int, ...]
MOST = 12  # readings of one node
NEAR = 2  # elements before the end of a dimension


class Unfit(Exception):
    """A node cannot be read at other sizes; the text says why."""


@dataclass(frozen=True, slots=True)
class Reading:
    """factor · the sizes of some dimensions of the first operand · some symbols + offset."""

    factor: Fraction = Fraction(1)
    dims: tuple[int, ...] = ()
    letters: tuple[str, ...] = ()
    offset: int = 0

    def at(self, shape: Shape, sizes: Sizes) -> int:
        """The number for an operand of this shape. Raises Unfit where it is none."""
        found = self.factor * prod(shape[dim] for dim in self.dims) + self.offset
        found *= prod(sizes[letter] for letter in self.letters)
        if found.denominator != 1 or found < 0:
            message = f"a size of {found} is no number of elements"
            raise Unfit(message)
        return int(found)


def fixed(number: int) -> Reading:
    """A number of the model's own."""
    return Reading(Fraction(number))


def readings(number: int, sizes: Sizes) -> list[Reading]:
    """How a number without an operand may be read: as the symbols it equals, then as itself."""
    found = [Reading(letters=(letter,)) for letter, size in sizes.items() if size == number]
    products = (
        Reading(letters=pair)
        for pair in itertools.combinations(sizes, 2)
        if sizes[pair[0]] * sizes[pair[1]] == number and 1 not in (sizes[x] for x in pair)
    )
    found += products
    return [fixed(number), *found] if number == 1 else [*found, fixed(number)]


def readings_of_list(numbers: Sequence[int], sizes: Sizes) -> list[tuple[Reading, ...]]:
    """The same for several numbers; different symbols for two of them before the same twice."""
    each = [readings(number, sizes) for number in numbers]
    found = itertools.islice(itertools.product(*each), 256)
    unlike = sorted(found, key=lambda row: _repeats(row, numbers))
    return unlike[:MOST]


def _repeats(row: tuple[Reading, ...], numbers: Sequence[int]) -> tuple[int, int]:
    """How many symbols are there twice, and how many of the numbers that equal one are fixed."""
    letters = [reading.letters for reading in row if reading.letters]
    pairs = zip(row, numbers, strict=True)
    return len(letters) - len(set(letters)), sum(not r.letters and n > 1 for r, n in pairs)


def readings_of_view(
    before: Shape, after: Shape, target: Shape, now: Sizes, at: Sizes
) -> list[tuple[Reading, ...]]:
    """How the sizes of a view may be read, of an operand that had the shape `before` at capture
    and has `after` where the symbols, `now` at capture, have the numbers `at`.

    A view keeps the order of elements: the more boundaries between dimensions stay where they
    are in both shapes, the likelier a reading; then those that have the symbols, further left.
    """
    each = [_unlike(_of_operand(size, before, after, now), after, at) for size in target]
    changes = {(now[letter], at[letter]) for letter in now}
    edges = _edges(before, after)
    found: list[tuple[tuple[int, ...], tuple[Reading, ...]]] = []
    for row in itertools.islice(itertools.product(*each), 4096):
        sized = tuple(reading.at(after, at) for reading in row)
        if prod(sized) == prod(after):
            pairs = list(zip(target, sized, strict=True))
            kept = -len(edges & _edges(target, sized))
            unlikely = sum(old != new and (old, new) not in changes for old, new in pairs)
            right = sum(place for place, (old, new) in enumerate(pairs) if old != new)
            found.append(((kept, unlikely, right), row))
    found.sort(key=lambda pair: pair[0])
    return [row for rank, row in found if rank[0] == found[0][0][0]][:MOST]


def _unlike(found: Iterable[Reading], after: Shape, at: Sizes) -> list[Reading]:
    """The first reading of each number."""
    kept: dict[int, Reading] = {}
    for reading in found:
        with suppress(Unfit):
            kept.setdefault(reading.at(after, at), reading)
    return list(kept.values())


def _edges(before: Shape, after: Shape) -> set[tuple[int, int]]:
    """How many elements lie before each boundary, at capture and now."""
    both = (itertools.accumulate(shape, int.__mul__) for shape in (before, after))
    return set(zip(*both, strict=True))


def _of_operand(number: int, before: Shape, after: Shape, now: Sizes) -> Iterator[Reading]:
    """How a size of a view may be read: dimensions of the operand as they are, symbols, the
    number itself, and a part or a multiple of dimensions that change."""
    rank = len(before)
    runs = [tuple(range(i, j)) for i in range(rank) for j in range(i + 1, rank + 1)]
    changing = [dims for dims in runs if _product(before, dims) != _product(after, dims)]
    for dims in changing:
        if _product(before, dims) == number:
            yield Reading(dims=dims)
    if changing:
        yield from (Reading(letters=(letter,)) for letter in now if now[letter] == number)
    yield fixed(number)
    for dims in changing:
        whole = _product(before, dims)
        if whole and number and (number % whole == 0 or whole % number == 0):
            yield Reading(factor=Fraction(number, whole), dims=dims)


def _product(shape: Shape, dims: Sequence[int]) -> int:
    return prod(shape[dim] for dim in dims)


def readings_of_end(number: int, before: int, after: int, dim: int, sizes: Sizes) -> list[Reading]:
    """How the end of a slice may be read, along a dimension of `before` and now `after`: near its
    end it may be counted from there."""
    found = readings(number, sizes)
    if before != after and before - number <= NEAR:
        found.append(Reading(dims=(dim,), offset=number - before))
    return found
