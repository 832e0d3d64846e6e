"""The conversions between placements: their forward, their backward, and the bytes they move.

The backward of a conversion is fixed by the gradients of its two types, so that a sharded forward
is differentiable as it stands. Megatron-LM's `f` is I → R and its `g` is P → I (1909.08053); its
sequence-parallel pair is S → R and P → S (2205.05198).

>>> from parcompiler.spmd.placement import P
>>> all_reduce = conversion(P, I)
>>> print(all_reduce.forward, "|", all_reduce.backward)
all-reduce | nothing
>>> moved(all_reduce.forward, nbytes=1000, n=4)
1500.0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from parcompiler.spmd.placement import I, Placement, R

Action = Literal[
    "nothing", "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "rotation",
    "take", "pad", "first"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Conversion:
    """One row of the table.

    Four of the actions communicate (`BYTES`, which also has the rotation of `ring`). `take` keeps
    the rank's piece, `pad` puts zeros around it, `first` keeps the value on rank 0 and makes zeros
    elsewhere.
    """

    source: str
    target: str
    forward: Action
    backward: Action


TABLE: tuple[Conversion, ...] = (
    Conversion("I", "R", "nothing", "all-reduce"),
    Conversion("I", "S", "take", "all-gather"),
    Conversion("I", "P", "first", "nothing"),
    Conversion("R", "I", "nothing", "first"),
    Conversion("R", "S", "take", "pad"),
    Conversion("S", "R", "all-gather", "reduce-scatter"),
    Conversion("S", "I", "all-gather", "take"),
    Conversion("S", "S", "all-to-all", "all-to-all"),
    Conversion("P", "R", "all-reduce", "all-reduce"),
    Conversion("P", "I", "all-reduce", "nothing"),
    Conversion("P", "S", "reduce-scatter", "all-gather"),
)
_BY_KINDS: Mapping[tuple[str, str], Conversion] = {(c.source, c.target): c for c in TABLE}

# Bytes that each of n ranks sends for a value of `nbytes` in all: the optimum, which rings reach.
BYTES: Mapping[Action, Callable[[float, int], float]] = {
    "all-reduce": lambda nbytes, n: 2 * nbytes * (n - 1) / n,
    "all-gather": lambda nbytes, n: nbytes * (n - 1) / n,
    "reduce-scatter": lambda nbytes, n: nbytes * (n - 1) / n,
    "all-to-all": lambda nbytes, n: nbytes * (n - 1) / n**2,
    "rotation": lambda nbytes, n: nbytes * (n - 1) / n,
}


def conversion(
    source: Placement, target: Placement, *, differentiable: bool = True, ending: bool = False
) -> Conversion | None:
    """The row that leads from `source` to `target`; None where the table has none.

    Without a gradient `R` and `I` are the same, and nothing happens backward. R → I exists for the
    loss only (`ending`): for other values nothing ensures that ranks agree on later computations. R
    → P does not exist, nor any conversion from or to rows that each rank sorted.

    >>> print(conversion(R, I), conversion(R, I, differentiable=False).forward)
    None nothing
    """
    if source == target:
        return Conversion(source.kind, target.kind, "nothing", "nothing")
    if (
        source.sorted
        or target.sorted
        or (differentiable and (source, target) == (R, I) and not ending)
    ):
        return None
    if differentiable:
        return _BY_KINDS.get((source.kind, target.kind))
    if source.is_whole and target.is_whole:
        return Conversion(source.kind, target.kind, "nothing", "nothing")
    row = _BY_KINDS.get((I.kind if source == R else source.kind, target.kind))
    return row and Conversion(source.kind, target.kind, row.forward, "nothing")


def moved(action: Action, nbytes: float, n: int) -> float:
    """Bytes that each of `n` ranks sends in one action on a value of `nbytes` in all."""
    return BYTES[action](nbytes, n) if action in BYTES else 0.0
