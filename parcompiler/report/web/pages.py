"""A report as HTML: a self-contained page, and a fragment for notebooks.

         tables of `sections` ──┐
charts: plotly.js, plain JSON ──┼──► page.html.jinja ──► one file
        drawn by the template   ┘

The page's content security policy forbids it to load anything.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from dataclasses import asdict
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from parcompiler.errors import InputError
from parcompiler.report import sections
from parcompiler.report.data import ReportData
from parcompiler.report.names import clean, ranges
from parcompiler.report.overview import bounded, following, subtitle, tiles, title
from parcompiler.report.table import Table
from parcompiler.report.units import BYTES, COUNT, SECONDS, percent, quantity
from parcompiler.report.web import charts, colors, timeline

HALF = 84  # letters in half the width of the page; wider tables get the full width
LONG = 28  # letters of a column before its texts wrap
CELLS = 8  # ranks in a row of the mesh; more are named by the first and the last


def page(report: ReportData) -> str:
    """The self-contained page."""
    return _environment().get_template("page.html.jinja").render(
        **_said(report),
        figures={name: asdict(figure) for name, figure in figures(report).items()},
        plotly=_plotly(),
        is_picture=timeline.is_picture(report),
        memory_said=charts.fullest(report),
        groups=[*sections.tables(report)],
    )  # fmt: skip


@cache
def _plotly() -> str:
    """plotly.js in 2 MB instead of 4.8: gzip in base64, which browsers since 2023 unpack.

    Raises InputError where plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        message = f"a page needs plotly ({error}): pip install 'parcompiler[report]'"
        raise InputError(message) from error
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def fragment(report: ReportData) -> str:
    """The summary for embedding in another page: no scripts, only its own style."""
    template = _environment().get_template("notebook.html.jinja")
    (make, *_) = sections.TABLES["Plan"]
    return template.render(**_said(report), facts=make(report))


def figures(report: ReportData) -> dict[str, charts.Figure]:
    """The charts by the id of their element in the page."""
    made = {
        "predicted": timeline.predicted(report),
        "measured": timeline.measured(report),
        "memory": charts.memory(report),
        "traffic": charts.matrix(report),
    }
    return {name: figure for name, figure in made.items() if figure is not None}


def _said(report: ReportData) -> dict[str, Any]:
    """The variables of both templates."""
    return {
        "report": report,
        "title": title(report),
        "subtitle": subtitle(report),
        "tiles": [*tiles(report)],
        "bounded": bounded(report),
        "next": following(report),
    }


def _environment() -> Environment:
    """The environment of the templates, with escaping."""
    environment = Environment(
        loader=PackageLoader("parcompiler.report.web"), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, autoescape=True,
    )  # fmt: skip
    environment.filters |= {
        "clean": clean, "lines": _lines, "anchor": _anchor, "soft": _soft, "ranges": ranges,
        "ranks": _ranks, "color": colors.stage, "ink": colors.ink, "percent": percent,
        "bytes": lambda value: quantity(value, BYTES),
        "amount": lambda value: quantity(value, COUNT),
        "seconds": lambda value: quantity(value, SECONDS),
    }  # fmt: skip
    environment.tests["wide"] = _is_wide
    environment.policies["json.dumps_kwargs"] = {"sort_keys": True, "separators": (",", ":")}
    environment.policies["json.dumps_function"] = json.dumps
    return environment


def _lines(text: str) -> Markup:
    """A heading with its line breaks as HTML."""
    return Markup("<br>".join(html.escape(clean(line)) for line in text.split("\n")))


def _soft(name: str, behind: str = "._/+") -> Markup:
    """A name that may be broken after dots, underscores and the like.

    >>> _soft("layers.0.self_attn")
    Markup('layers.<wbr>0.<wbr>self_<wbr>attn')
    """
    return Markup(re.sub(rf"([{behind}])(?=\w)", r"\1<wbr>", html.escape(clean(name))))


def _ranks(coordinate: int, replicas: int) -> list[str]:
    """The ranks at a pipeline coordinate; the first and the last of many.

    >>> _ranks(1, 4), _ranks(1, 64)
    (['4', '5', '6', '7'], ['64 … 127'])
    """
    ranks = range(coordinate * replicas, (coordinate + 1) * replicas)
    return [*map(str, ranks)] if len(ranks) <= CELLS else [f"{ranks[0]} … {ranks[-1]}"]


def _is_wide(table: Table) -> bool:
    """Whether a table needs more than half the width of the page."""
    letters = 0
    for column in table.columns:
        texts = (cell.text for cell in column.cells)
        longest = max(map(len, [*column.heading.split("\n"), *texts]))
        letters += 2 + (min(longest, LONG) if column.wrap else longest)
    return letters > HALF


def _anchor(name: str) -> str:
    """A heading as the fragment of a URL.

    >>> _anchor("Closed forms")
    'closed-forms'
    """
    return "-".join(name.lower().split())
