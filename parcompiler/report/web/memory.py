"""The memory of each rank over the step, and the limit of the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parcompiler.report.data import ReportData
from parcompiler.report.events import Level
from parcompiler.report.units import BYTES, SECONDS, quantity
from parcompiler.report.web.colors import RED, line
from parcompiler.report.web.figure import Figure, shown, unit

MOST = 1200  # points of a rank; a screen has no more columns
NEAR = 2.0  # a limit farther above the peak than this would press all lines to the ground
DASHES = ("solid", "dash", "dot", "dashdot")  # a rank and the one with its colour differ in these


def memory(report: ReportData) -> Figure:
    """Lines with steps, one a rank, drawn at the highest that each column of the screen shows."""
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
    entries = [  # of the limits, in the legend
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
        "xaxis": {
            "title": {"text": f"predicted time ({seconds})"},
            "range": [0, end / second],
            "zeroline": False,
        },
        "yaxis": {
            "title": {"text": f"memory ({bytes_})"},
            "range": [0, 1.08 * max(*near, peak, 0) / byte or 1],
            "zeroline": False,
        },
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
        "margin": {"t": 36, "l": 64, "b": 44},
        "shapes": shapes,
    }
    return Figure([*lines, *entries], layout)


def said(report: ReportData) -> str:
    """What the chart cannot show: the limit, and how near the fullest rank comes."""
    peaks = [rank.peak_memory for rank in report.ranks]
    rank, _ = report.fullest
    limit = report.mesh.limit(rank)
    used = f"{quantity(peaks[rank], BYTES)} of {quantity(limit, BYTES)}"
    where = "" if limit <= NEAR * max(peaks) else "; the limit is far above this chart"
    return f"Rank {rank} fills its memory the most: {used}{where}."


def _highest(levels: Sequence[Level], end: float) -> Iterator[Level]:
    """The levels, or of more than `MOST` of them the highest of each of as many equal times."""
    if len(levels) <= MOST or not end:
        yield from levels
        return
    highest: dict[int, Level] = {}
    for level in levels:
        column = int(level.second / end * MOST)
        if column not in highest or level.nbytes > highest[column].nbytes:
            highest[column] = level
    yield from highest.values()
