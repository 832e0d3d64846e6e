"""Closed forms in the number of tensor ranks: polynomials in 1/t, through those at some numbers.

A rank computes, moves and sends a part of the whole, which is a sum of A, B/t and, where all send
to all, C/t². Two or three numbers of ranks tell these apart, and the forms must be right at others.
They are found from two ranks on, where pieces are even and the same operators run: those of one
head on each rank may be others.

>>> at = {t: Polynomials(((("b", 1),),), ((Fraction(12, t) + 4,),)) for t in (2, 4, 8)}
>>> found = through(at)
>>> [(powers, int(part)) for powers, part in zip(found.monomials, found.rows[0])]
[((('b', 1), ('t', 0)), 4), ((('b', 1), ('t', -1)), 12)]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import sympy

from parcompiler.graph import Graph
from parcompiler.spmd.runtime_call import Piece
from parcompiler.symbolic.fit import Least, Monomial, Polynomials, inverse
from parcompiler.symbolic.forms import FIELDS, Template, symbol
from parcompiler.symbolic.quantities import LISTS
from parcompiler.symbolic.reading import Unfit
from parcompiler.symbolic.search import ClosedForms

RANKS = (2, 4, 8, 3, 6, 16, 5, 32)  # that are tried, until there are `ENOUGH`
FEWEST, ENOUGH = 3, 4  # to tell A + B/t, and C/t² too, and to check it once
LETTER = "t"


@dataclass(frozen=True, slots=True)
class OverRanks:
    """Templates, and the shapes of values by name, in the number of tensor ranks: the forms are
    right for those in `ranks`. They are in no such letter where there are none; `reason` says why.
    """

    templates: Mapping[str, Template]
    shapes: Mapping[str, Polynomials]
    ranks: tuple[int, ...] = ()
    reason: str = ""


def over_ranks(found: Mapping[int, ClosedForms]) -> OverRanks:
    """The forms in the number of ranks, from those for some numbers. Raises Unfit."""
    if len(found) < FEWEST - 1:
        said = ", ".join(map(str, found)) or "none"
        message = f"too few numbers of ranks run the same operators on even pieces ({said})"
        raise Unfit(message)
    first = next(iter(found.values()))
    return OverRanks(
        {name: _template({t: forms.templates[name] for t, forms in found.items()})
         for name in first.templates},
        {name: through({t: forms.named_shapes[name] for t, forms in found.items()})
         for name in first.named_shapes},
        tuple(sorted(found)),
    )  # fmt: skip


def check(found: OverRanks, others: Mapping[int, ClosedForms]) -> None:
    """Refuse forms of which a field is right for none of other numbers of ranks. These run other
    operators (one rank exchanges nothing), so that it need not be right for all. Raises Unfit."""
    for name, template in found.templates.items():
        for field in FIELDS:
            form = getattr(template.forms, field)
            given = ((t, getattr(own.templates[name].forms, field))
                     for t, own in others.items() if name in own.templates)  # fmt: skip
            if all(sympy.expand(form.subs(symbol(LETTER), t) - known) != 0 for t, known in given):
                ranks = ", ".join(map(str, found.ranks))
                message = f"{field} of {name} on {ranks} ranks does not tell it on others"
                raise Unfit(message)


def is_even(graph: Graph, ranks: int) -> bool:
    """Whether all tensor ranks hold and compute as much, in the graph of one of them."""
    shards = [item.shard for item in graph.parameters if item.shard is not None]
    given = ((node.args, *node.kwargs.values()) for node in graph.fx_graph.nodes)
    return all(shard.even(ranks) for shard in shards) and not any(map(_is_uneven, given))


def _is_uneven(argument: object) -> bool:
    if isinstance(argument, list | tuple):
        return any(map(_is_uneven, argument))
    return isinstance(argument, Piece)


def run_alike(found: ClosedForms, others: ClosedForms) -> bool:
    """Whether the same blocks run the same operators."""
    return _operators(found) == _operators(others)


def _operators(forms: ClosedForms) -> dict[str, list[list[str]]]:
    return {
        name: [[operation.name for operation in getattr(item.like, side)] for side in LISTS]
        for name, item in forms.templates.items()
    }


def _template(at: Mapping[int, Template]) -> Template:
    """A template with t as a letter, from those for some numbers of ranks. Raises Unfit."""
    like = next(iter(at.values()))
    near = through({t: item.found.near for t, item in at.items()})
    same = all(item.found.far is item.found.near for item in at.values())
    far = near if same else through({t: item.found.far for t, item in at.items()})
    return dataclasses.replace(
        like,
        letters=(*like.letters, LETTER),
        found=Least(near, far),
        limits=through({t: item.limits for t, item in at.items()}),
        state=through({t: item.state for t, item in at.items()}),
    )


def through(at: Mapping[int, Polynomials]) -> Polynomials:
    """Polynomials with t as a letter, from those for some numbers of ranks. Raises Unfit where they
    are no sums of few powers of 1/t."""
    degree = 2 if len(at) >= ENOUGH else 1
    count = len(next(iter(at.values())).rows)
    columns: dict[Monomial, list[Fraction]] = {}
    known = {t: {m: [row[k] for row in item.rows] for k, m in enumerate(item.monomials)}
             for t, item in at.items()}  # fmt: skip
    for monomial in dict.fromkeys(m for item in at.values() for m in item.monomials):
        for row in range(count):
            values = {t: own[monomial][row] if monomial in own else Fraction()
                      for t, own in known.items()}  # fmt: skip
            for k, part in enumerate(_parts(values, degree)):
                column = columns.setdefault((*monomial, (LETTER, -k)), [Fraction()] * count)
                column[row] = part
    used = tuple(monomial for monomial, column in columns.items() if any(column))
    rows = (tuple(columns[monomial][row] for monomial in used) for row in range(count))
    return Polynomials(used, tuple(rows))


def _parts(values: Mapping[int, Fraction], degree: int) -> list[Fraction]:
    """The parts of a number in 1, 1/t, ... from what it is for some t. Raises Unfit."""
    if not any(values.values()):
        return [Fraction()] * (degree + 1)
    powers = {t: [Fraction(1, t**k) for k in range(degree + 1)] for t in values}
    told = [*values][: degree + 1]
    lines = inverse([powers[t] for t in told])
    found = [_dot(line, [values[t] for t in told]) for line in lines]
    if any(_dot(powers[t], found) != value for t, value in values.items()):
        message = "its costs are no polynomials of low degree in 1/t"
        raise Unfit(message)
    return found


def _dot(row: list[Fraction], column: list[Fraction]) -> Fraction:
    return sum((a * b for a, b in zip(row, column, strict=True)), Fraction())
