"""What must hold of the cells S3, N3 and T3, which all ranks have for the head of a micro-batch.

>>> from parcompiler.schedules.action import NOWHERE
>>> own = [Action(Kind.S, NOWHERE, 0), Action(Kind.T, NOWHERE, 0)]
>>> check_head([own, own], 1)
>>> check_head([own, own[:1]], 1)
Traceback (most recent call last):
parcompiler.errors.InputError: rows 1 and 2 differ in S, N and T: all ranks have them in one order
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parcompiler.errors import InputError
from parcompiler.instruction import Kind
from parcompiler.schedules.action import NOWHERE, Action


def check_head(rows: Sequence[Iterable[Action]], microbatches: int) -> None:
    """Raise InputError unless all rows have S and T, or S, N and T, of every micro-batch, or none.

    Those of a micro-batch stand in this order.
    """
    first, *others = map(list, rows)
    for row, own in enumerate(others, 2):
        if own != first:
            message = f"rows 1 and {row} differ in S, N and T: all ranks have them in one order"
            raise InputError(message)
    if not first:
        return
    normalized = any(action.kind is Kind.NORMALIZE for action in first)
    phases = (Kind.S, Kind.NORMALIZE, Kind.T) if normalized else (Kind.S, Kind.T)
    for i in range(microbatches):
        wanted = [Action(kind, NOWHERE, i) for kind in phases]
        missing = [action.cell for action in wanted if action not in first]
        if missing:
            message = f"{missing[0]} is missing: every rank does its part of every micro-batch"
            raise InputError(message)
        found = sorted(wanted, key=first.index)
        if found != wanted:
            names = " ".join(action.cell for action in found)
            message = f"{names} stand in this order, and each needs the one before it in S, N, T"
            raise InputError(message)
    for action in first:
        if action.microbatch >= microbatches:
            message = f"{action.cell} is of a micro-batch that no stage computes"
            raise InputError(message)
