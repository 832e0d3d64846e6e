"""The sections about closed forms: what blocks and stages cost in the sizes of the inputs."""

from __future__ import annotations

from parcompiler.report.data import ReportData
from parcompiler.report.table import Table, facts, number, short, table, words


def symbols(report: ReportData) -> Table:
    """What the letters of the closed forms stand for."""
    rows = (
        (item.letter, f"{item.word}{', from 2 on' * (item.letter == 'b')}, here {item.now:,}")
        if item.now is not None
        else (item.word, f"as captured: {item.reason}")
        for item in report.symbols
    )
    return facts("Symbols in the closed forms", rows)


def forms(report: ReportData) -> Table:
    """What a block, or a stage, costs for one micro-batch on a rank."""
    forms = report.forms
    return table(
        "Closed forms",
        words("of", (form.name for form in forms)),
        number("blocks", (f"× {form.blocks}" if form.blocks else "" for form in forms)),
        short("what", (form.what for form in forms)),
        words("for one micro-batch", (form.value.replace("**", "^") for form in forms)),
    )
