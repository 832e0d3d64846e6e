"""Costs as polynomials in the sizes, computed exactly from their values at a few points.

A cost of a block is a sum of products of sizes, of low degree: degree 1 in the batch, 2 in the
lengths together (attention). From its values at as many points the coefficients follow by solving
with whole numbers; further points show whether the degrees were high enough.

>>> points = [{"b": b, "s": s} for b in (1, 2) for s in (3, 4)]
>>> monomials = [(("b", i), ("s", j)) for i in (0, 1) for j in (0, 1)]
>>> fit(monomials, points, [[3 * p["b"] * p["s"] + 5 for p in points]])
[{(('b', 0), ('s', 0)): Fraction(5, 1), (('b', 1), ('s', 1)): Fraction(3, 1)}]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import sympy
from sympy import QQ
from sympy.polys.matrices import DomainMatrix

from parcompiler.symbolic.naming import named, symbol
from parcompiler.symbolic.sizes import Sizes

Monomial = tuple[tuple[str, int], ...]  # the power of each letter
Polynomial = Mapping[Monomial, Fraction]  # the coefficients that are not 0
Number = int | float | Fraction
FINEST = 4096  # the largest denominator of a cost: what a rank sends is a part of the whole


@dataclass(frozen=True, slots=True)
class Term:
    """A polynomial, and the smaller of two more if there are `choices`."""

    sum: Polynomial
    choices: tuple[Polynomial, ...] = ()

    def at(self, sizes: Sizes) -> Fraction:
        """The value."""
        return value(self.sum, sizes) + min((value(one, sizes) for one in self.choices), default=0)


def fit(
    monomials: Sequence[Monomial], points: Sequence[Sizes], columns: Iterable[Sequence[Number]]
) -> list[Polynomial]:
    """The polynomials with these monomials that have the values of a column at as many points."""
    columns = [tuple(map(exact, column)) for column in columns]
    if not columns:
        return []
    distinct = list(dict.fromkeys(columns))
    matrix = _matrix([[_worth(m, point) for m in monomials] for point in points])
    solved = matrix.lu_solve(_matrix([*zip(*distinct, strict=True)])).transpose().to_list()
    rows = ([Fraction(int(x.numerator), int(x.denominator)) for x in row] for row in solved)
    polynomials = {
        column: {m: number for m, number in zip(monomials, row, strict=True) if number}
        for column, row in zip(distinct, rows, strict=True)
    }
    return [polynomials[column] for column in columns]


def value(polynomial: Polynomial, sizes: Sizes) -> Fraction:
    """The value of a polynomial, exactly."""
    return sum((c * _worth(m, sizes) for m, c in polynomial.items()), Fraction())


def exact(number: Number) -> Fraction:
    """A number of FLOPs or bytes, which a sum of parts of thirds may miss by a rounding.

    >>> exact(12.0), exact(8 / 3)
    (Fraction(12, 1), Fraction(8, 3))
    """
    whole = Fraction(number)
    return whole.limit_denominator(FINEST) if isinstance(number, float) else whole


def expression(terms: Sequence[Term], names: Mapping[str, int]) -> sympy.Expr:
    """The sum of terms with names for sizes; without names, coefficients are added up first."""
    sums = [term.sum for term in terms]
    if not names:
        total: dict[Monomial, Fraction] = {}
        for polynomial in sums:
            for monomial, number in polynomial.items():
                total[monomial] = total.get(monomial, Fraction()) + number
        sums = [total]
    least = (
        sympy.Min(*(_written(polynomial, names) for polynomial in term.choices))
        for term in terms
        if term.choices
    )
    return sympy.Add(*(_written(polynomial, names) for polynomial in sums), *least)


def _written(polynomial: Polynomial, names: Mapping[str, int]) -> sympy.Expr:
    """A polynomial with names for sizes."""
    return sympy.Add(
        *(
            named(number, names) * sympy.Mul(*(symbol(letter) ** power for letter, power in m))
            for m, number in polynomial.items()
        )
    )


def _worth(monomial: Monomial, sizes: Sizes) -> Fraction:
    """The product of sizes; the power of one may be negative."""
    return prod((Fraction(sizes[letter]) ** power for letter, power in monomial), start=Fraction(1))


def _matrix(rows: Sequence[Sequence[Fraction]]) -> DomainMatrix:
    values = [[QQ(number.numerator, number.denominator) for number in row] for row in rows]
    return DomainMatrix(values, (len(rows), len(rows[0])), QQ)
