"""Sections -> text for a terminal or a pipe, drawn by rich."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text
from rich.theme import Theme

from parcompiler.report.data import ReportData
from parcompiler.report.names import clean
from parcompiler.report.sections import sections
from parcompiler.report.table import Cell, Column, Drawing, Table

INDENT = 2
GAP = 2  # between columns
WORD = 8  # letters of a wrapped name that must fit into a line
NARROWEST = 40
MORE = "All tables: --details, or report.to_text()"

STYLES = Theme(
    {
        "strong": "bold",
        "dim": "dim",
        "forward": "blue",
        "backward": "green",
        "warning": "yellow",
        "error": "bold red",
    },
    inherit=False,
)

# ASCII replacements of characters that not every terminal has.
ASCII = str.maketrans({"…": "...", "×": "x", "→": "->", "µ": "u"})
_LINE = "    \n    \n {0} \n    \n    \n    \n    \n    \n"
HEAD = {False: box.Box(_LINE.format("──")), True: box.Box(_LINE.format("--"), ascii=True)}


def plain(report: ReportData, width: int, *, details: bool = True) -> str:
    """ASCII text without colours and without spaces at the ends of lines."""
    console = _console(max(width, NARROWEST))
    drawn = _drawn(console, report, details=details, ascii_only=True)
    return "\n".join(line.rstrip() for line in drawn.splitlines()) + "\n"


def for_stdout(report: ReportData, *, details: bool) -> str:
    """Coloured text as wide as the terminal; plain text if standard output is no terminal."""
    if not sys.stdout.isatty():
        return plain(report, 100, details=details).removesuffix("\n")
    terminal = Console()
    ascii_only = not terminal.encoding.startswith("utf")
    system = terminal.color_system if not terminal.no_color else None
    console = _console(max(terminal.width, NARROWEST), color_system=system, force_terminal=True)
    drawn = _drawn(console, report, details=details, ascii_only=ascii_only)
    return drawn.removesuffix("\n")


def _console(width: int, **options: Any) -> Console:
    """A console that writes into memory and ignores the environment."""
    return Console(
        file=io.StringIO(),
        width=width,
        theme=STYLES,
        markup=False,
        emoji=False,
        highlight=False,
        force_jupyter=False,
        legacy_windows=False,
        _environ={},
        **options,
    )


def _drawn(console: Console, report: ReportData, *, details: bool, ascii_only: bool) -> str:
    """The report as the console writes it."""
    for number, section in enumerate(sections(report, console.width - INDENT, details=details)):
        if number:
            console.print()
        console.print(_text(Cell(section.title, "strong"), ascii_only))
        if isinstance(section, Drawing):
            lines = (Text.assemble(*line, no_wrap=True, overflow="crop") for line in section.lines)
            parts: list[Group | Grid] = [Group(*lines)]
        else:
            parts = [_grid(part, ascii_only) for part in _parts(section, console.width - INDENT)]
        for part in parts:
            console.print(Padding(part, (0, 0, 0, INDENT), expand=False))
    if not details:
        console.print()
        console.print(_text(Cell(MORE, "dim"), ascii_only))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _parts(table: Table, width: int) -> Iterator[Table]:
    """The table or, if it is too wide, several with some of its columns, each with the first one:
    no number is cut."""
    first, *others = table.columns
    part, used = [first], _least(first)
    for column in others:
        least = _least(column) + GAP
        if len(part) > 1 and used + least > width:
            yield Table(table.title, tuple(part))
            part, used = [first], _least(first)
        part.append(column)
        used += least
    yield Table(table.title, tuple(part))


def _least(column: Column) -> int:
    """The width of a column in characters; words can be wrapped."""
    heading = max(map(cell_len, column.heading.split("\n")))
    if column.wrap:
        return max(heading, WORD)
    texts = (clean(cell.text).translate(ASCII) for cell in column.cells)
    return max(heading, *map(cell_len, texts))


def _grid(table: Table, ascii_only: bool) -> Grid:
    """A table of rich, with headings if it has any."""
    headed = any(column.heading for column in table.columns)
    grid = Grid(
        box=HEAD[ascii_only] if headed else None,
        show_header=headed,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1 if headed else 2, 0, 0),
        header_style="dim",
    )
    for column in table.columns:
        grid.add_column(
            Text("\n").join(_text(Cell(t), ascii_only) for t in column.heading.split("\n")),
            justify="left" if column.words else "right",
            vertical="top",
            overflow="fold",
            no_wrap=not column.wrap,
        )
    for row in table.rows:
        grid.add_row(*(_text(cell, ascii_only) for cell in row))
    return grid


def _text(cell: Cell, ascii_only: bool) -> Text:
    """A cell with unprintable characters, or those beyond ASCII, replaced."""
    text = clean(cell.text)
    if ascii_only:
        text = text.translate(ASCII).encode("ascii", "backslashreplace").decode()
    return Text(text, style=cell.style)
