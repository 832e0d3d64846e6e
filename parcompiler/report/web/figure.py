"""A chart as plotly.js draws it: traces and a layout, plain JSON without the colours of a page.

Nothing here imports plotly: the page carries plotly.js, and the tests hold the charts against the
schema of the package.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

from parcompiler.report.names import clean
from parcompiler.report.units import Scale

DIGITS = 7


@dataclass(frozen=True, slots=True)
class Figure:
    """Traces and layout, after plotly.js's reference."""

    data: list[dict[str, Any]]
    layout: dict[str, Any]


def unit(largest: float, scale: Scale) -> tuple[float, str]:
    """The unit in which a person would read figures up to `largest`, and its sign.

    >>> unit(0.0034, ((1e-3, "ms"), (1.0, "s")))
    (0.001, 'ms')
    """
    return next((pair for pair in reversed(scale) if largest >= pair[0]), scale[0])


def shown(value: float) -> float:
    """A number as exact as an eye can be, which keeps a page small."""
    return float(f"{value:.{DIGITS}g}")


def escaped(name: str) -> str:
    """A name as plotly.js shows it: it reads some HTML in texts, and a name must not be it.

    >>> escaped("<b>x</b>")
    '&lt;b&gt;x&lt;/b&gt;'
    """
    return html.escape(clean(name), quote=False)


def axis_of_ranks(ranks: int, word: str = "rank ") -> dict[str, Any]:
    """An axis with a row for each rank, the first at the top; every second is named if many are."""
    step = 1 if ranks <= 32 else 1 + ranks // 32
    numbers = [*range(0, ranks, step)]
    return {
        "range": [ranks - 0.5, -0.5],
        "tickvals": numbers,
        "ticktext": [f"{word}{rank}" for rank in numbers],
        "showgrid": False,
        "zeroline": False,
        "fixedrange": True,
    }
