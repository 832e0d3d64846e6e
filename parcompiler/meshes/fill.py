"""The shortest step of a pipeline whose blocks could be divided at will: filling it takes time.

Given       n[k]              pieces of kind k; f[k], b[k], w[k] seconds of the forward, of the
                              gradient of the inputs and of that of the weights, for a micro-batch
            v                 seconds that are on any rank
            J(r), m           the stages of rank r, in order; micro-batches
Decide      x[k,j] >= 0       pieces on stage j, in fractions
            y[r] >= 0         what rank r has of v
            S[j], G[j]        forward of the stages before j; input gradients of those behind
Minimize    T
Subject to  all is somewhere  sum(x[k,j] over j) = n[k];  sum(y[r]) = v
            work              T >= m (F + B + W of the stages of r, and y[r])
            fill              T >= S[j] + m (F of the stages of r from j on, all its B and W)
            turn              T >= S[all] + G[j] + m (B and W of the stages of r up to j)

No stage can begin before the first micro-batch has passed all before it; no backward before that
has passed all stages and come back. So this holds for every order of compute: it is a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parcompiler.errors import InfeasibleError
from parcompiler.solver import Model, Term, UndecidedError, Variable, solve


@dataclass(frozen=True, slots=True)
class Piece:
    """Equal blocks: how many, and the seconds of one for a micro-batch."""

    count: int
    forward: float
    back: float
    weight: float

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.back + self.weight


def least_step(
    pieces: Sequence[Piece], floating: float, placement: Sequence[int], microbatches: int
) -> float:
    """Seconds that no step of these pieces on stages of this placement is below.

    >>> pieces = [Piece(4, 1.0, 1.0, 1.0)]
    >>> round(least_step(pieces, 0.0, (0,), 2), 6), 6.0 < least_step(pieces, 0.0, (0, 1), 1) <= 10.0
    (24.0, True)
    """
    unit = sum(piece.count * piece.seconds for piece in pieces) + floating
    if unit <= 0:
        return 0.0
    return unit * _solved(_programme([_scaled(p, unit) for p in pieces], floating / unit, placement,
                                     microbatches))  # fmt: skip


def _scaled(piece: Piece, unit: float) -> Piece:
    """Seconds as parts of all work, which is what a solver with tolerances wants."""
    return Piece(piece.count, piece.forward / unit, piece.back / unit, piece.weight / unit)


def _solved(model: Model) -> float:
    """The objective; 0, which is a bound as well, where the solver gives up."""
    try:
        return float(solve(model).objective)
    except (InfeasibleError, UndecidedError):
        return 0.0


def _programme(pieces: Sequence[Piece], floating: float, placement: Sequence[int], m: int) -> Model:
    """The programme as it is stated above."""
    model, stages = Model(), range(len(placement))
    x = [[model.continuous(f"x[{k},{j}]") for j in stages] for k in range(len(pieces))]
    y = [model.continuous(f"y[{r}]") for r in range(max(placement) + 1)]
    step = model.continuous("T")
    for piece, row in zip(pieces, x, strict=True):
        model.constrain([(1, here) for here in row], piece.count, piece.count)
    model.constrain([(1, own) for own in y], floating, floating)

    def of(j: int, times: float, *fields: str) -> list[Term]:
        """The seconds of a stage, so many times, with their sign."""
        return [
            (times * sum(getattr(piece, name) for name in fields), row[j])
            for piece, row in zip(pieces, x, strict=True)
        ]

    ahead = _sums(model, "S", [of(j, 1, "forward") for j in stages])
    behind = _sums(model, "G", [of(j, 1, "back") for j in reversed(stages)])[::-1]
    total = sum(piece.count * piece.forward for piece in pieces)
    for r, own in enumerate(y):
        here = [j for j in stages if placement[j] == r]
        late = [term for j in here for term in of(j, -m, "back", "weight")]
        early = [term for j in here for term in of(j, -m, "forward")]
        model.constrain([(1, step), (-m, own), *early, *late], low=0)
        for k, j in enumerate(here):
            rest = [term for i in here[k:] for term in of(i, -m, "forward")]
            model.constrain([(1, step), (-1, ahead[j]), *rest, *late], low=0)
            back = [term for i in here[: k + 1] for term in of(i, -m, "back", "weight")]
            model.constrain([(1, step), (-1, behind[j + 1]), *back], low=total)
    model.minimize([(1, step)])
    return model


def _sums(model: Model, name: str, parts: Sequence[Sequence[Term]]) -> list[Variable]:
    """Variables for the sums of the first 0, 1, ... parts."""
    found = [model.continuous(f"{name}[0]", 0, 0)]
    for number, terms in enumerate(parts, start=1):
        found.append(model.continuous(f"{name}[{number}]"))
        negative = [(-a, variable) for a, variable in terms]
        model.constrain([(1, found[-1]), (-1, found[-2]), *negative], 0, 0)
    return found
