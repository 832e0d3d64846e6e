"""A report as HTML: a page that needs no other file, and a piece for notebooks.

         tables of `sections` ──┐
charts: plotly.js, plain JSON ──┼──► page.html.jinja ──► one file
  what the template draws itself┘

The page may load nothing: its content security policy says so to the browser.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from parcompiler.report import sections
from parcompiler.report.names import clean
from parcompiler.report.overview import title
from parcompiler.report.table import Table
from parcompiler.report.units import ratio
from parcompiler.report.web import memory, pictures, summary, timeline
from parcompiler.report.web.figure import Figure
from parcompiler.report.web.matrix import matrix

if TYPE_CHECKING:
    from parcompiler.report.report import Report

CONSIDERED = "considered"  # with this end titles of what was weighed against what was chosen
GROUPS = {  # the heading over the tables of a module; others are headed by the module's name
    "overview": "Plan",
    "division": "Stages",
    "placements": "Placements",
    "traffic": "Values",
    "vocabulary": "Vocabulary",
    "forms": "Closed forms",
}
ALTERNATIVES = "Alternatives"
HALF = 84  # letters in half the width of the page; a table that needs more has all of it
LONG = 28  # letters of a column whose texts are wrapped


def page(report: Report) -> str:
    """A page that needs no other file."""
    drawn = figures(report)
    return _environment().get_template("page.html.jinja").render(
        **_said(report),
        figures={name: asdict(figure) for name, figure in drawn.items()},
        plotly=Markup(get_plotlyjs()),
        is_picture=timeline.is_picture(report),
        memory_said=memory.said(report),
        groups=[*_groups(report)],
        alternatives=ALTERNATIVES,
        best=ratio(1.0),
    )  # fmt: skip


def fragment(report: Report) -> str:
    """The summary for the middle of another page: no scripts, no style but its own."""
    (facts, *_) = (tables for name, tables in _groups(report) if name == GROUPS["overview"])
    template = _environment().get_template("notebook.html.jinja")
    return template.render(**_said(report), facts=facts[0])


def figures(report: Report) -> dict[str, Figure]:
    """The charts by the name of their place in the page."""
    found = {
        "predicted": timeline.predicted(report),
        "measured": timeline.measured(report),
        "memory": memory.memory(report),
        "traffic": matrix(report),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def _said(report: Report) -> dict[str, Any]:
    """What both templates show."""
    return {
        "title": clean(title(report)),
        "subtitle": summary.subtitle(report),
        "tiles": [*summary.tiles(report)],
        "parts": [*pictures.parts(report)],
        "spread": pictures.spread(report),
        "rows": [*pictures.rows(report)],
        "mesh": report.mesh,
    }


def _groups(report: Report) -> Iterator[tuple[str, list[Table]]]:
    """All tables that say something, under headings, those of the alternatives first."""
    found: dict[str, list[Table]] = {GROUPS["overview"]: [], ALTERNATIVES: []}
    for make in sections.TABLES:
        table = make(report)
        if table.rows:
            module = make.__module__.rpartition(".")[2]
            name = GROUPS.get(module, module.replace("_", " ").capitalize())
            name = ALTERNATIVES if table.title.endswith(CONSIDERED) else name
            found.setdefault(name, []).append(table)
    yield from ((name, tables) for name, tables in found.items() if tables)


def _environment() -> Environment:
    """Templates in which all text is text."""
    environment = Environment(
        loader=PackageLoader("parcompiler.report.web"), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, autoescape=True,
    )  # fmt: skip
    environment.filters |= {"clean": clean, "lines": _lines, "anchor": _anchor, "soft": _soft}
    environment.tests["wide"] = _is_wide
    environment.policies["json.dumps_kwargs"] = {"sort_keys": True, "separators": (",", ":")}
    environment.policies["json.dumps_function"] = json.dumps
    return environment


def _lines(text: str) -> Markup:
    """A heading whose line breaks are kept."""
    return Markup("<br>".join(html.escape(clean(line)) for line in text.split("\n")))


def _soft(name: str, behind: str = "._/+") -> Markup:
    """A name that may be broken behind its dots, underscores and the like.

    >>> _soft("layers.0.self_attn")
    Markup('layers.<wbr>0.<wbr>self_<wbr>attn')
    """
    return Markup(re.sub(rf"([{behind}])(?=\w)", r"\1<wbr>", html.escape(clean(name))))


def _is_wide(table: Table) -> bool:
    """Whether a table needs more than half the width of the page."""
    letters = 0
    for number, column in enumerate(table.columns):
        texts = [row[number].text for row in table.rows if number < len(row)]
        longest = max(map(len, [*column.heading.split("\n"), *texts]))
        letters += 2 + (min(longest, LONG) if column.wrap else longest)
    return letters > HALF


def _anchor(name: str) -> str:
    """A heading as the end of an address.

    >>> _anchor("Closed forms")
    'closed-forms'
    """
    return "-".join(name.lower().split())
