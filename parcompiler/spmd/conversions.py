"""The conversions between placements: what each does forward and backward, and the bytes it moves.

The backward of a conversion is fixed by the gradients of its two types, so that a sharded forward
is differentiable as it stands. Megatron-LM's `f` is I → R and its `g` is P → I (1909.08053); its
sequence-parallel pair is S → R and P → S (2205.05198).

>>> from parcompiler.spmd.placement import P
>>> found = conversion(P, I)
>>> print(found.forward, "|", found.backward)
all-reduce | nothing
>>> traffic(P, I, nbytes=1000, n=4)
Traffic(forward=1500.0, backward=0.0)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from parcompiler.spmd.placement import I, Placement, R

Action = Literal[
    "nothing", "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "take", "pad", "first"
]


@dataclass(frozen=True, slots=True)
class Conversion:
    """One row of the table.

    Of the actions four talk: all-reduce, all-gather, reduce-scatter, all-to-all. `take` keeps the
    rank's piece, `pad` puts zeros around it, `first` keeps the value on rank 0 and zeros elsewhere.
    """

    source: str
    target: str
    forward: Action
    backward: Action


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that each rank sends, forward and backward."""

    forward: float = 0.0
    backward: float = 0.0


TABLE: tuple[Conversion, ...] = (
    Conversion("I", "R", "nothing", "all-reduce"),
    Conversion("I", "S", "take", "all-gather"),
    Conversion("I", "P", "first", "nothing"),
    Conversion("R", "S", "take", "pad"),
    Conversion("S", "R", "all-gather", "reduce-scatter"),
    Conversion("S", "I", "all-gather", "take"),
    Conversion("S", "S", "all-to-all", "all-to-all"),
    Conversion("P", "R", "all-reduce", "all-reduce"),
    Conversion("P", "I", "all-reduce", "nothing"),
    Conversion("P", "S", "reduce-scatter", "all-gather"),
)
_BY_KINDS: Mapping[tuple[str, str], Conversion] = {(c.source, c.target): c for c in TABLE}

# Bytes that each of n ranks sends for a value of so many bytes when it is whole, by the bound that
# rings reach.
BYTES: Mapping[Action, Callable[[float, int], float]] = {
    "all-reduce": lambda nbytes, n: 2 * nbytes * (n - 1) / n,
    "all-gather": lambda nbytes, n: nbytes * (n - 1) / n,
    "reduce-scatter": lambda nbytes, n: nbytes * (n - 1) / n,
    "all-to-all": lambda nbytes, n: nbytes * (n - 1) / n**2,
}


def conversion(
    source: Placement, target: Placement, *, differentiable: bool = True
) -> Conversion | None:
    """The row that leads from `source` to `target`; None where the table has none.

    Without a gradient `R` and `I` are the same, and nothing happens backward. R → I is not offered
    for values with one: nothing says that ranks agree on what follows. Nor is R → P.

    >>> print(conversion(R, I), conversion(R, I, differentiable=False).forward)
    None nothing
    """
    if source == target:
        return Conversion(source.kind, target.kind, "nothing", "nothing")
    if differentiable:
        return _BY_KINDS.get((source.kind, target.kind))
    if source.is_whole and target.is_whole:
        return Conversion(source.kind, target.kind, "nothing", "nothing")
    found = _BY_KINDS.get((I.kind if source == R else source.kind, target.kind))
    return found and Conversion(source.kind, target.kind, found.forward, "nothing")


def traffic(
    source: Placement, target: Placement, *, nbytes: float, n: int, differentiable: bool = True
) -> Traffic | None:
    """What a conversion of a value of `nbytes` (whole) sends; None where there is none.

    >>> from parcompiler.spmd.placement import P
    >>> traffic(R, P, nbytes=8, n=2) is None
    True
    """
    found = conversion(source, target, differentiable=differentiable)
    if found is None:
        return None
    return Traffic(moved(found.forward, nbytes, n), moved(found.backward, nbytes, n))


def moved(action: Action, nbytes: float, n: int) -> float:
    """Bytes that each rank sends in one action."""
    return BYTES[action](nbytes, n) if action in BYTES else 0.0
