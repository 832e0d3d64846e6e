"""Charts for plotly.js: traces and a layout, plain JSON without the colours of a page.

These are the memory of ranks and the messages between them; the step is drawn in `timeline`.
Nothing imports plotly: the page contains plotly.js, and tests compare the charts with the schema of
the package.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from parcompiler.instruction import Kind
from parcompiler.report.data import ReportData
from parcompiler.report.events import Level
from parcompiler.report.names import clean
from parcompiler.report.units import BYTES, SECONDS, quantity, unit
from parcompiler.report.web.colors import RED, line

DIGITS = 7
NAMED = 12  # ranks up to which the matrix has room for figures
MOST = 1200  # points of a rank; a screen has no more columns
NEAR = 2.0  # times the peak: a higher limit would flatten all lines
DASHES = ("solid", "dash", "dot", "dashdot")  # to tell apart ranks of one colour


@dataclass(frozen=True, slots=True)
class Figure:
    """Traces and layout, as plotly.js reads them."""

    data: list[dict[str, Any]]
    layout: dict[str, Any]


def shown(value: float) -> float:
    """A number with the digits that a chart can show, which keeps pages small."""
    return float(f"{value:.{DIGITS}g}")


def escaped(name: str) -> str:
    """A name for plotly.js, which reads some HTML in texts.

    >>> escaped("<b>x</b>")
    '&lt;b&gt;x&lt;/b&gt;'
    """
    return html.escape(clean(name), quote=False)


def axis_of_ranks(ranks: int, word: str = "rank ") -> dict[str, Any]:
    """An axis with a row for each rank, the first at the top; if there are many, not all are
    named."""
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


def axis_to(end: float, title: str) -> dict[str, Any]:
    """An axis of numbers from 0 to `end`."""
    return {"title": {"text": title}, "range": [0, end], "zeroline": False}


def matrix(report: ReportData) -> Figure | None:
    """A matrix of bytes sent between ranks, darker for more; None if nothing is sent."""
    sent, ranks = traffic(report), range(len(report.ranks))
    if not sent:
        return None
    texts = [
        [quantity(sent[source, to], BYTES) if sent[source, to] else "" for to in ranks]
        for source in ranks
    ]
    hover = [
        [f"rank {source} to rank {to}: {text or 'nothing'}" for to, text in enumerate(row)]
        for source, row in enumerate(texts)
    ]
    down = axis_of_ranks(len(ranks), "")
    across = {**down, "range": down["range"][::-1], "side": "top"}
    size = max(22, min(64, 520 // len(ranks)))
    trace = {
        "type": "heatmap",
        "z": [[sent[source, to] or None for to in ranks] for source in ranks],
        "text": texts,
        "texttemplate": "%{text}" if len(ranks) <= NAMED else "",
        "textfont": {"size": 11},
        "hovertext": hover,
        "hoverinfo": "text",
        "hoverongaps": False,
        "xgap": 2,
        "ygap": 2,
        "zmin": 0,
        "zmax": max(sent.values()) or 1,
        "showscale": False,
    }
    layout = {
        "height": 70 + len(ranks) * size,
        "xaxis": {**across, "title": {"text": "receiving rank", "standoff": 6}},
        "yaxis": {**down, "title": {"text": "sending rank", "standoff": 6}},
        "margin": {"t": 52, "l": 52, "b": 14},
    }
    return Figure([trace], layout)


def traffic(report: ReportData) -> Counter[tuple[int, int]]:
    """Bytes that a rank sends to another in a step, values and their gradients."""
    sizes = {value.name: value.nbytes for value in report.values}
    sent: Counter[tuple[int, int]] = Counter()
    for event in report.trail.events:
        if event.kind is Kind.SEND:
            line = event.instruction
            assert line.peer is not None
            assert line.value is not None
            sent[event.rank, line.peer] += sizes.get(line.value, 0)
    return sent


def memory(report: ReportData) -> Figure:
    """A step line for each rank, reduced to the highest level in each column of the screen."""
    peak = max(rank.peak_memory for rank in report.ranks)
    limits = sorted({report.mesh.limit(rank) for rank in range(len(report.ranks))})
    near = [limit for limit in limits if limit <= NEAR * peak]
    last = max((levels[-1].second for levels in report.trail.memory if levels), default=0.0)
    end = max(report.step.seconds, last)
    (second, seconds), (byte, bytes_) = unit(end, SECONDS), unit(peak, BYTES)
    limit_line = {"color": RED, "width": 2, "dash": "dash"}
    lines = []
    for rank, trail in enumerate(report.trail.memory):
        levels = [*_highest(trail, end)]
        if levels:
            levels.append(Level(end, levels[-1].nbytes))
        hover = (
            f"rank {rank}: {quantity(level.nbytes, BYTES)} from {quantity(level.second, SECONDS)}"
            for level in levels
        )
        dash = DASHES[rank // 8 % len(DASHES)]
        lines.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"rank {rank}",
                "x": [shown(level.second / second) for level in levels],
                "y": [shown(level.nbytes / byte) for level in levels],
                "line": {"shape": "hv", "color": line(rank), "width": 1.8, "dash": dash},
                "hovertext": [*hover],
                "hoverinfo": "text",
            }
        )
    entries = [  # the limits in the legend
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"limit {quantity(limit, BYTES)}",
            "x": [None],
            "y": [limit / byte],
            "line": limit_line,
        }
        for limit in near
    ]
    shapes = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": height, "y1": height,
         "line": limit_line}
        for height in (limit / byte for limit in near)
    ]  # fmt: skip
    layout = {
        "height": 360,
        "xaxis": axis_to(end / second, f"predicted time ({seconds})"),
        "yaxis": axis_to(1.08 * max(*near, peak, 0) / byte or 1, f"memory ({bytes_})"),
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
        "margin": {"t": 36, "l": 64, "b": 44},
        "shapes": shapes,
    }
    return Figure([*lines, *entries], layout)


def fullest(report: ReportData) -> str:
    """A sentence beside the chart: the limit, and how near the fullest rank comes."""
    peaks = [rank.peak_memory for rank in report.ranks]
    rank, _ = report.fullest
    limit = report.mesh.limit(rank)
    used = f"{quantity(peaks[rank], BYTES)} of {quantity(limit, BYTES)}"
    where = "" if limit <= NEAR * max(peaks) else "; the limit is far above this chart"
    return f"Rank {rank} fills its memory the most: {used}{where}."


def _highest(levels: Sequence[Level], end: float) -> Iterator[Level]:
    """The levels; if there are more than `MOST`, the highest in each of `MOST` equal intervals."""
    if len(levels) <= MOST or not end:
        yield from levels
        return
    highest: dict[int, Level] = {}
    for level in levels:
        column = int(level.second / end * MOST)
        if column not in highest or level.nbytes > highest[column].nbytes:
            highest[column] = level
    yield from highest.values()
