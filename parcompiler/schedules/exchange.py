"""Orders of compute as CSV, in the format of torch.distributed.pipelining.

    0F0,0F1,,,0B0,,0B1      one row per rank, one cell per action: stage, letter, micro-batch
    ,1F0,1B0,1F1,1I1,1W1    an empty or missing cell is an idle slot

F is a forward, B a full backward, I an input backward and W a weight backward. torch writes rows
of different lengths and ignores the places of idle slots; so do we: they follow from the order.
Its extended format, with communication in the cells, is refused: lowering adds communication.

Our own plans have further cells, which torch does not know: S3, N3 and T3 in every row are the
passes of all ranks for the head of micro-batch 3.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from parcompiler import documents
from parcompiler.errors import InputError, shown
from parcompiler.instruction import HEAD, Kind
from parcompiler.schedules.action import (
    LETTERS,
    NOWHERE,
    Action,
    Orders,
    backward,
    backward_input,
    backward_weight,
    forward,
)

_CELL = re.compile(r"([0-9]{1,9})?([A-Z_]+)([0-9]{1,9})?")
_KINDS = {letter: kind for kind, letter in LETTERS.items()}
_OVERLAP = "OVERLAP_F_B"  # (0F1;3B0)OVERLAP_F_B is two actions in one cell
_OTHERS = {"SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD", _OVERLAP}
_EXAMPLES = "for example 2F0, 2B0, 2I0 or 2W0"


class CsvCell(NamedTuple):
    """The place of a cell, counted from 1 as in a spreadsheet."""

    row: int
    column: int

    def __str__(self) -> str:
        """The place in the words of error messages."""
        return f"row {self.row}, column {self.column}"


CellOf = Mapping[Action, CsvCell]  # every action of a file, in its order


def write_csv(path: str | os.PathLike[str], orders: Orders) -> None:
    """Write a row per rank and a cell per action, without idle slots and the vocabulary."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(
            [action.cell for action in order if action.kind not in HEAD] for order in orders
        )


def read_csv(path: str | os.PathLike[str]) -> tuple[tuple[int, ...], Orders]:
    """The rank of every stage and the order on every rank. Raises InputError; see `from_csv`."""
    text = documents.text_of(path).removeprefix("\ufeff")
    try:
        return read_orders(_rows(text))
    except InputError as error:
        error.add_note(f"in {path}")
        raise


def read_orders(rows: Sequence[Sequence[str]]) -> tuple[tuple[int, ...], Orders]:
    """The rank of every stage and the order on every rank, from cells; raises as `read_csv`."""
    if not rows:
        message = "a schedule has a row for each rank (0 found)"
        raise InputError(message)
    cells, shared = _cells_of(rows)
    placement = _placement(cells, len(rows))
    _check_complete(cells, len(placement))
    _check_order(cells)
    _check_head(shared, 1 + max(action.microbatch for action in cells))
    return placement, _orders(cells, shared)


def _rows(text: str) -> list[list[str]]:
    """The cells of a text without the empty rows at its end."""
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text, newline=""))]
    except csv.Error as error:
        message = f"a schedule is a text file of comma-separated values ({error})"
        raise InputError(message) from error
    while rows and not any(rows[-1]):
        rows.pop()
    return rows


def _cells_of(
    rows: Sequence[Sequence[str]],
) -> tuple[dict[Action, CsvCell], list[dict[Action, CsvCell]]]:
    """The cell of every action of a stage, and by row the cells of the actions of the head."""
    stages: dict[Action, CsvCell] = {}
    shared: list[dict[Action, CsvCell]] = [{} for _ in rows]
    for row, cells in enumerate(rows, 1):
        for column, cell in enumerate(cells, 1):
            if cell:
                place = CsvCell(row, column)
                action = _parse(cell, place)
                known = shared[row - 1] if action.kind in HEAD else stages
                if action in known:
                    message = f"{cell} stands twice ({known[action]} and {place})"
                    raise InputError(message)
                known[action] = place
    return stages, shared


def _parse(cell: str, place: CsvCell) -> Action:
    """The action that a cell names."""
    match = _CELL.fullmatch(cell)
    stage, word, microbatch = match.groups() if match else (None, None, None)
    if word in _OTHERS or cell.endswith(_OVERLAP):
        message = (
            f"{place} is {shown(cell)}, and a schedule orders compute alone ({_EXAMPLES}): "
            "export the schedule without communication"
        )
        raise InputError(message)
    kind = _KINDS.get(word or "")
    if kind is None or (stage is None) is not (kind in HEAD) or microbatch is None:
        message = f"{place} is {shown(cell)}, which is no action ({_EXAMPLES})"
        raise InputError(message)
    return Action(kind, NOWHERE if stage is None else int(stage), int(microbatch))


def _placement(cells: CellOf, num_rows: int) -> tuple[int, ...]:
    """The rank of every stage. Stages are 0, 1, ...; every rank has one, each stage one rank."""
    first: dict[int, tuple[Action, CsvCell]] = {}
    for action, place in cells.items():
        other, before = first.setdefault(action.stage, (action, place))
        if before.row != place.row:
            message = (
                f"stage {action.stage} is on two ranks ({other.cell} in {before}, "
                f"{action.cell} in {place}): a stage stays in one row"
            )
            raise InputError(message)
    for j, stage in enumerate(sorted(first)):
        if j != stage:
            message = f"stage {j} is missing ({first[stage][0].cell} in {first[stage][1]})"
            raise InputError(message)
    for row in sorted(set(range(1, num_rows + 1)) - {place.row for place in cells.values()}):
        message = f"row {row} is empty: rank {row - 1} has no stage"
        raise InputError(message)
    return tuple(first[j][1].row - 1 for j in range(len(first)))


def _check_complete(cells: CellOf, num_stages: int) -> None:
    """Raise InputError unless all stages have forward and backward of micro-batches 0, 1, ...

    A backward is whole or in two parts.
    """
    seen = {action.microbatch for action in cells}
    for j in range(num_stages):
        for i in range(len(seen)):
            missing = _missing(cells, j, i)
            if missing is not None:
                largest = max(cells, key=lambda action: action.microbatch)
                message = (
                    f"{missing.cell} is missing: every stage computes every micro-batch, from 0 "
                    f"to {largest.microbatch} ({largest.cell} in {cells[largest]})"
                )
                raise InputError(message)
            if backward(j, i) in cells and _parts(j, i) & cells.keys():
                part = min(_parts(j, i) & cells.keys(), key=lambda action: cells[action])
                message = (
                    f"stage {j} has two backwards of micro-batch {i} ({backward(j, i).cell} in "
                    f"{cells[backward(j, i)]}, {part.cell} in {cells[part]}): a backward is B, "
                    "or I and W"
                )
                raise InputError(message)


def _parts(stage: int, microbatch: int) -> set[Action]:
    """The two parts of a backward."""
    return {backward_input(stage, microbatch), backward_weight(stage, microbatch)}


def _missing(cells: CellOf, stage: int, microbatch: int) -> Action | None:
    """An action that a stage lacks for a micro-batch."""
    if forward(stage, microbatch) not in cells:
        return forward(stage, microbatch)
    if backward(stage, microbatch) in cells:
        return None
    parts = sorted(_parts(stage, microbatch) - cells.keys())
    return backward(stage, microbatch) if len(parts) == 2 else parts[0] if parts else None


def _check_order(cells: CellOf) -> None:
    """Raise InputError unless forwards stand before backwards, and I before W."""
    for action, place in cells.items():
        for earlier in _before(action):
            if cells[earlier] > place:
                message = (
                    f"{action.cell} in {place} stands before {earlier.cell} in column "
                    f"{cells[earlier].column}, which it needs: swap them"
                )
                raise InputError(message)


def _before(action: Action) -> Iterator[Action]:
    """The action that must stand before an action on the same rank."""
    _, j, i = action
    if action.kind is Kind.BACKWARD_WEIGHT:
        yield backward_input(j, i)
    elif action.kind is not Kind.FORWARD:
        yield forward(j, i)


def _orders(cells: CellOf, shared: Sequence[CellOf]) -> Orders:
    """The actions of each row."""
    orders = [list(column.items()) for column in shared]
    for action, place in cells.items():
        orders[place.row - 1].append((action, place))
    return tuple(
        tuple(action for action, _ in sorted(order, key=itemgetter(1))) for order in orders
    )


def _check_head(rows: Sequence[Iterable[Action]], microbatches: int) -> None:
    """Raise InputError unless all rows have S and T, or S, N and T, of every micro-batch, or none.

    Those of a micro-batch stand in this order.

    >>> own = [Action(Kind.S, NOWHERE, 0), Action(Kind.T, NOWHERE, 0)]
    >>> _check_head([own, own], 1)
    >>> _check_head([own, own[:1]], 1)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    parcompiler.errors.InputError: rows 1 and 2 differ in S, N and T: ...
    """
    first, *others = map(list, rows)
    for row, passes in enumerate(others, 2):
        if passes != first:
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
        order = sorted(wanted, key=first.index)
        if order != wanted:
            names = " ".join(action.cell for action in order)
            message = f"{names} stand in this order, and each needs the one before it in S, N, T"
            raise InputError(message)
    for action in first:
        if action.microbatch >= microbatches:
            message = f"{action.cell} is of a micro-batch that no stage computes"
            raise InputError(message)
