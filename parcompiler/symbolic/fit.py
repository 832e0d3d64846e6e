"""Polynomials in the sizes, found exactly from their values at a few points.

A cost of a block is a sum of products of sizes, of low degree: degree 1 in the batch, 2 in the
lengths together (attention). From its values at as many points the coefficients follow by solving
with whole numbers; further points show whether the degrees were high enough.

>>> space = Space({"b": (1, 2), "s": (1, 2, 3)}, lengths=2)
>>> found = fit(space, [[3 * p["b"] * p["s"] ** 2 + 5] for p in space.points])
>>> [f"{c} b^{i} s^{j}" for c, ((_, i), (_, j)) in zip(found.rows[0], found.monomials)]
['5 b^0 s^0', '3 b^1 s^2']
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import lcm, prod

from parcompiler.symbolic.sizes import Sizes

Number = int | float | Fraction
Monomial = tuple[tuple[str, int], ...]  # the power of each letter
FINEST = 4096  # the largest denominator of a cost: what a rank sends is a part of the whole


@dataclass(frozen=True)
class Polynomials:
    """Several polynomials with the same monomials: a row of coefficients for each."""

    monomials: tuple[Monomial, ...]
    rows: tuple[tuple[Fraction, ...], ...]

    def at(self, sizes: Sizes) -> list[Number]:
        """Their values, exactly: whole numbers where they are."""
        powers = [prod(sizes[letter] ** power for letter, power in m) for m in self.monomials]
        whole, denominator = self._whole
        found = (sum(map(operator.mul, row, powers)) for row in whole)
        return [*found] if denominator == 1 else [_ratio(value, denominator) for value in found]

    @cached_property
    def _whole(self) -> tuple[list[list[int]], int]:
        return _whole(self.rows)


def constants(numbers: Iterable[int], letters: Iterable[str]) -> Polynomials:
    """Numbers that no letter changes."""
    nothing: Monomial = tuple((letter, 0) for letter in letters)
    return Polynomials((nothing,), tuple((Fraction(number),) for number in numbers))


@dataclass(frozen=True)
class Least:
    """The smaller of two polynomials, for each of several numbers: `far` holds for many rows."""

    near: Polynomials
    far: Polynomials

    def at(self, sizes: Sizes) -> list[Number]:
        """Their values, exactly."""
        if self.far is self.near:
            return self.near.at(sizes)
        return [*map(min, self.near.at(sizes), self.far.at(sizes))]


@dataclass(frozen=True, slots=True)
class Space:
    """The numbers that each letter takes, one more than the degree in it; the powers of all but
    the first (the batch) add up to `lengths` at most."""

    values: Mapping[str, Sequence[int]]
    lengths: int

    @property
    def monomials(self) -> list[Monomial]:
        """The products of powers that there may be."""
        return [tuple(zip(self.values, powers, strict=True)) for powers in self._powers()]

    @property
    def points(self) -> list[dict[str, int]]:
        """As many points, which tell their coefficients: a corner of the grid."""
        columns = list(self.values.values())
        return [
            {
                letter: column[i]
                for letter, column, i in zip(self.values, columns, place, strict=True)
            }
            for place in self._powers()
        ]

    def _powers(self) -> list[tuple[int, ...]]:
        first = 1 if "b" in self.values else 0
        ranges = (range(len(column)) for column in self.values.values())
        return [p for p in itertools.product(*ranges) if sum(p[first:]) <= self.lengths]


def fit(space: Space, values: Sequence[Sequence[Number]]) -> Polynomials:
    """The polynomials of a space with these values: a list for each of its points."""
    columns = [list(map(exact, column)) for column in zip(*values, strict=True)]
    monomials = space.monomials
    matrix = [
        [Fraction(prod(point[letter] ** power for letter, power in m)) for m in monomials]
        for point in space.points
    ]
    lines, denominator = _whole(inverse(matrix))
    rows = [
        [Fraction(sum(map(operator.mul, line, column)), denominator) for line in lines]
        for column in columns
    ]
    used = [i for i in range(len(monomials)) if any(row[i] for row in rows)]
    return Polynomials(
        monomials=tuple(monomials[i] for i in used),
        rows=tuple(tuple(row[i] for i in used) for row in rows),
    )


def exact(value: Number) -> int | Fraction:
    """A number of FLOPs or bytes, which a sum of parts of thirds may miss by a rounding.

    >>> exact(12.0), exact(8 / 3)
    (12, Fraction(8, 3))
    """
    if isinstance(value, float):
        return int(value) if value.is_integer() else Fraction(value).limit_denominator(FINEST)
    return value


def _ratio(value: int, denominator: int) -> Number:
    whole, rest = divmod(value, denominator)
    return Fraction(value, denominator) if rest else whole


def inverse(matrix: Sequence[Sequence[Fraction]]) -> list[list[Fraction]]:
    """The inverse of a square matrix, by elimination."""
    n = len(matrix)
    rows = [[*row, *(Fraction(i == j) for j in range(n))] for i, row in enumerate(matrix)]
    for k in range(n):
        pivot = next(i for i in range(k, n) if rows[i][k])
        rows[k], rows[pivot] = rows[pivot], rows[k]
        rows[k] = [value / rows[k][k] for value in rows[k]]
        for i in range(n):
            if i != k and rows[i][k]:
                factor = rows[i][k]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[k], strict=True)]
    return [row[n:] for row in rows]


def _whole(matrix: Sequence[Sequence[Fraction]]) -> tuple[list[list[int]], int]:
    """A matrix as whole numbers over one denominator."""
    denominator = lcm(*(value.denominator for row in matrix for value in row))
    return [[int(value * denominator) for value in row] for row in matrix], denominator
