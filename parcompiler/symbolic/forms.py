"""What the blocks of a template cost in the sizes of the captured model, in closed form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import sympy

from parcompiler.cost import BlockCost
from parcompiler.cost.collective import SENT
from parcompiler.cost.operation import EXCHANGE
from parcompiler.symbolic.fit import Least, Monomial, Polynomials
from parcompiler.symbolic.naming import split
from parcompiler.symbolic.quantities import LISTS, Cap, counted


@dataclass(frozen=True)
class Forms:
    """What a block of a template costs for one micro-batch on one rank, as expressions.

    `flops_*` count a multiplication with its addition as 2; all others are bytes: `bytes_*` are
    moved between the device and its memory, `sent_*` what the rank sends to others of the tensor
    axis, `saved` is kept from the forward to the backward, `message` the size of all outputs.
    `parameters`, `gradients` and `optimizer` are those of trainable parameters.
    """

    flops_forward: sympy.Expr
    flops_backward: sympy.Expr
    bytes_forward: sympy.Expr
    bytes_backward: sympy.Expr
    sent_forward: sympy.Expr
    sent_backward: sympy.Expr
    saved: sympy.Expr
    message: sympy.Expr
    parameters: sympy.Expr
    gradients: sympy.Expr
    optimizer: sympy.Expr

    @property
    def averaged(self) -> sympy.Expr:
        """Bytes that the rank sends to its data replicas, `d` with itself, once a step."""
        share: Callable[..., Any] = SENT["all-reduce"]
        found: sympy.Expr = share(self.gradients, symbol("d"))
        return found


STATE = ("parameters", "gradients", "optimizer")
FIELDS = tuple(field.name for field in dataclasses.fields(Forms))


def sums(cost: BlockCost) -> dict[str, float]:
    """The numbers of a cost by the fields of `Forms`, but those of parameters."""
    found = {"saved": float(cost.saved), "message": float(cost.output_bytes)}
    for side in ("forward", "backward"):
        operations = getattr(cost, side)
        found[f"flops_{side}"] = sum(one.flops for one in operations)
        sent = sum(one.nbytes for one in operations if one.kind == EXCHANGE)
        found[f"sent_{side}"] = sent
        found[f"bytes_{side}"] = sum(one.nbytes for one in operations) - sent
    return found


@dataclass(frozen=True)
class Template:
    """The forms of one template. `blocks` are its blocks by name, `like` its cost at some sizes,
    `found` what its numbers are besides what it reads of `tables`, which have `limits` bytes.
    `state` are the bytes of each trainable tensor, then those of their optimizer states; `tensors`
    are their places among the tensors of a block."""

    name: str
    blocks: tuple[str, ...]
    letters: tuple[str, ...]
    like: BlockCost
    found: Least
    tables: tuple[Cap, ...]
    limits: Polynomials
    state: Polynomials
    tensors: tuple[int, ...]

    @cached_property
    def forms(self) -> Forms:
        """The sums, as expressions."""
        return self.named({})

    def named(self, names: Mapping[str, int]) -> Forms:
        """The sums, as expressions in which sizes of the model have names."""
        sums: dict[str, list[int]] = {name: [] for name in FIELDS}
        row = 0
        for side in ("forward", "backward", "weight"):
            for operation in getattr(self.like, side):
                if side != "weight":  # it is part of the backward
                    told = "sent" if operation.kind == EXCHANGE else "bytes"
                    sums[f"flops_{side}"].append(row)
                    sums[f"{told}_{side}"].append(row + 1)
                row += 2
        for place, name in enumerate(counted(self.like), row):
            if name in ("saved", "output_bytes"):
                sums["message" if name == "output_bytes" else name].append(place)
        found = {name: self._sum(rows, names) for name, rows in sums.items() if name not in STATE}
        found["bytes_forward"] += sum(
            sympy.Min(
                cap.itemsize * self._sum([cap.flops], names), expression(self.limits, [k], names)
            )
            for k, cap in enumerate(self.tables)
        )
        pairs = self.states(names)
        values, optimizer = (sympy.Add(*(pair[k] for pair in pairs)) for k in (0, 1))
        return Forms(**found, parameters=values, gradients=values, optimizer=optimizer)

    def states(self, names: Mapping[str, int]) -> list[tuple[sympy.Expr, sympy.Expr]]:
        """The bytes of each trainable tensor and of its optimizer states."""
        count = len(self.tensors)
        return [
            (expression(self.state, [k], names), expression(self.state, [count + k], names))
            for k in range(count)
        ]

    def inner(self, names: Mapping[str, int]) -> sympy.Expr:
        """The bytes saved besides those of the outputs."""
        first = 2 * sum(len(getattr(self.like, name)) for name in LISTS)
        places = {name: [first + k] for k, name in enumerate(counted(self.like))}
        return self._sum(places["saved"], names) - self._sum(places["saved_outputs"], names)

    def _sum(self, rows: Sequence[int], names: Mapping[str, int]) -> sympy.Expr:
        """The sum of some of the numbers."""
        near, far = self.found.near, self.found.far
        total = sympy.Integer(0)
        alike = []
        for row in rows:
            if far is near or _terms(near, [row]) == _terms(far, [row]):
                alike.append(row)
            else:
                total += sympy.Min(expression(near, [row], names), expression(far, [row], names))
        return total + expression(near, alike, names)


def _terms(found: Polynomials, rows: Sequence[int]) -> dict[Monomial, Fraction]:
    """The coefficients of a sum of rows, without those that are 0."""
    sums = (
        sum((found.rows[row][k] for row in rows), Fraction()) for k in range(len(found.monomials))
    )
    return {m: c for m, c in zip(found.monomials, sums, strict=True) if c}


def expression(found: Polynomials, rows: Sequence[int], names: Mapping[str, int]) -> sympy.Expr:
    """A sum of rows with names for sizes; without names, coefficients are added up first."""
    each = [[row] for row in rows] if names else [rows]
    terms = (
        _worth(c, names) * sympy.Mul(*(symbol(letter) ** power for letter, power in m))
        for some in each
        for m, c in _terms(found, some).items()
    )
    return sympy.Add(*terms)


def _worth(number: Fraction, names: Mapping[str, int]) -> sympy.Expr:
    """A coefficient, with names for sizes of the model."""
    factor, letters = split(number, names)
    return sympy.Rational(factor) * sympy.Mul(*map(symbol, letters))


def symbol(letter: str) -> sympy.Symbol:
    """The symbol of a size."""
    return sympy.Symbol(letter, integer=True, positive=True)
