"""The memory of each rank over the step, and the limit of the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from parcompiler.report.events import Level
from parcompiler.report.units import BYTES, SECONDS, quantity
from parcompiler.report.web.colors import RED, line
from parcompiler.report.web.figure import Figure, shown, unit

if TYPE_CHECKING:
    from parcompiler.report.report import Report

MOST = 1200  # points of a rank; a screen has no more columns
NEAR = 2.0  # a limit farther above the peak than this would press all lines to the ground
DASHES = ("solid", "dash", "dot", "dashdot")  # a rank and the one with its colour differ in these


def memory(report: Report) -> Figure:
    """Lines with steps, one a rank, drawn at the highest that each column of the screen shows."""
    peak = max(rank.peak_memory for rank in report.ranks)
    limits = sorted({report.mesh.limit(rank) for rank in range(len(report.ranks))})
    seconds = max((levels[-1].second for levels in report.trail.memory if levels), default=0.0)
    end = max(report.step.seconds, seconds)
    times, bytes_ = unit(end, SECONDS), unit(peak, BYTES)
    near = [limit for limit in limits if limit <= NEAR * peak]
    layout = {
        "height": 360,
        "xaxis": {
            "title": {"text": f"predicted time ({times[1]})"},
            "range": [0, end / times[0]],
            "zeroline": False,
        },
        "yaxis": {
            "title": {"text": f"memory ({bytes_[1]})"},
            "range": [0, 1.08 * max(*near, peak, 0) / bytes_[0] or 1],
            "zeroline": False,
        },
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
        "margin": {"t": 36, "l": 64, "b": 44},
        "shapes": [_limit(limit / bytes_[0]) for limit in near],
    }
    lines = (_line(report, rank, end, times, bytes_) for rank in range(len(report.ranks)))
    return Figure([*lines, *(_name_of_limit(limit, bytes_[0]) for limit in near)], layout)


def said(report: Report) -> str:
    """What the chart cannot show: the limit, and how near the fullest rank comes."""
    peaks = [rank.peak_memory for rank in report.ranks]
    fullest = max(range(len(peaks)), key=lambda rank: peaks[rank] / report.mesh.limit(rank))
    limit = report.mesh.limit(fullest)
    parts = f"{quantity(peaks[fullest], BYTES)} of {quantity(limit, BYTES)}"
    where = "" if limit <= NEAR * max(peaks) else ", far above this chart"
    return f"Rank {fullest} is the fullest with {parts}{where}."


def _line(
    report: Report, rank: int, end: float, times: tuple[float, str], bytes_: tuple[float, str]
) -> dict[str, Any]:
    """The memory of a rank."""
    levels = [*_highest(report.trail.memory[rank], end)]
    if levels:
        levels.append(Level(end, levels[-1].nbytes))
    hover = (
        f"rank {rank}: {quantity(level.nbytes, BYTES)} from {quantity(level.second, SECONDS)}"
        for level in levels
    )
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"rank {rank}",
        "x": [shown(level.second / times[0]) for level in levels],
        "y": [shown(level.nbytes / bytes_[0]) for level in levels],
        "line": {
            "shape": "hv",
            "color": line(rank),
            "width": 1.8,
            "dash": DASHES[rank // 8 % len(DASHES)],
        },
        "hovertext": [*hover],
        "hoverinfo": "text",
    }


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


def _limit(height: float) -> dict[str, Any]:
    """The line at the memory of the device."""
    style = {"color": RED, "width": 2, "dash": "dash"}
    ends = {"x0": 0, "x1": 1, "y0": height, "y1": height}
    return {"type": "line", "xref": "paper", **ends, "line": style}


def _name_of_limit(limit: int, scale: float) -> dict[str, Any]:
    """The line's entry in the legend."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"limit {quantity(limit, BYTES)}",
        "x": [None],
        "y": [limit / scale],
        "line": {"color": RED, "width": 2, "dash": "dash"},
    }
