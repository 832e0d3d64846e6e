"""What a report says, before it is drawn: titled tables and drawings of plain text.

The words may hold `…`, `×`, `→` and `µ`; whatever draws them finds others where these cannot be
shown. Styles are names of what a text means, not colours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Cell(NamedTuple):
    """A piece of text. Styles: "", "strong", "dim", "forward", "backward", "warning", "error"."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """The heading of a column. `words` are aligned left, numbers right; `wrap` may be wrapped.

    A line break in a heading is one.
    """

    heading: str
    words: bool = False
    wrap: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under headings; without headings, facts beside their names."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """Lines that must not be wrapped."""

    title: str
    lines: tuple[tuple[Cell, ...], ...]


Section = Table | Drawing


def table(title: str, columns: Iterable[Column], rows: Iterable[Iterable[str | Cell]]) -> Table:
    """A table of texts, some of which may have a style."""
    cells = (tuple(c if isinstance(c, Cell) else Cell(c) for c in row) for row in rows)
    return Table(title, tuple(columns), tuple(cells))


def words(heading: str) -> Column:
    """A column of words that may be long."""
    return Column(heading, words=True, wrap=True)


def short(heading: str) -> Column:
    """A column of short words."""
    return Column(heading, words=True)


def facts(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """Names and what is to be said of them."""
    return table(title, [short(""), words("")], [named(name, fact) for name, fact in rows])


def named(name: str, *figures: str) -> tuple[Cell, ...]:
    """A row with its name in front."""
    return Cell(name, "dim"), *map(Cell, figures)
