"""The contents of a report before rendering: titled tables and drawings of plain text.

The text may contain `…`, `×`, `→` and `µ`, which `render` replaces where they cannot be shown.
Styles name the meaning of a text, not a colour.

>>> table("Stages", number("stage", range(2)), words("blocks", ["embed", "head"])).rows[1]
(Cell(text='1', style=''), Cell(text='head', style=''))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from parcompiler.report.units import Scale, column


class Cell(NamedTuple):
    """A styled piece of text. Styles: "", "strong", "dim", "forward", "backward", "warning",
    "error"."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """Cells under a heading, which may have line breaks.

    `words` are aligned left, numbers right; `wrap` allows line breaks in the cells.
    """

    heading: str
    cells: tuple[Cell, ...]
    words: bool = False
    wrap: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Columns under a title; without headings, names and facts."""

    title: str
    columns: tuple[Column, ...]

    @property
    def rows(self) -> tuple[tuple[Cell, ...], ...]:
        """The cells by row; shorter columns are padded with empty cells."""
        return tuple(zip_longest(*(column.cells for column in self.columns), fillvalue=Cell("")))


@dataclass(frozen=True, slots=True)
class Drawing:
    """Lines that must not be wrapped."""

    title: str
    lines: tuple[tuple[Cell, ...], ...]


def table(title: str, *columns: Column) -> Table:
    """A table of columns."""
    return Table(title, columns)


def number(heading: str, cells: Iterable[object]) -> Column:
    """A column of numbers."""
    return Column(heading, _cells(cells))


def scaled(heading: str, values: Iterable[float | None], scale: Scale) -> Column:
    """A column of numbers in units of a scale; None is shown as nothing."""
    return number(heading, column([value or 0.0 for value in values], scale))


def short(heading: str, cells: Iterable[object]) -> Column:
    """A column of short words."""
    return Column(heading, _cells(cells), words=True)


def words(heading: str, cells: Iterable[object]) -> Column:
    """A column of words that may be long."""
    return Column(heading, _cells(cells), words=True, wrap=True)


def facts(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """A table of names and facts."""
    rows = [*rows]
    names, texts = (Cell(name, "dim") for name, _ in rows), (text for _, text in rows)
    return table(title, short("", names), words("", texts))


def _cells(cells: Iterable[object]) -> tuple[Cell, ...]:
    """Texts as cells; some may be styled already."""
    return tuple(cell if isinstance(cell, Cell) else Cell(str(cell)) for cell in cells)
