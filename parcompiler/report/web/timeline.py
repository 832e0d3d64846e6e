"""A step as a chart: a row for each rank, time from left to right, messages in a lane below it.

rank 0  [F0][F1]....[B0][  B1  ]      a bar for each instruction, labelled where there is room;
           -- --       --  --         of very many instructions a picture without the lanes
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from parcompiler.instruction import (
    COMPUTE,
    EMBEDDING,
    HEAD,
    MESSAGES,
    TRANSFERS,
    Instruction,
    Kind,
)
from parcompiler.report.events import Event, Ran
from parcompiler.report.gantt import WORDS
from parcompiler.report.units import SECONDS, quantity
from parcompiler.report.web.colors import GREEN, GREY, KINDS, PURPLE, ink, paler
from parcompiler.report.web.figure import Figure, axis_of_ranks, escaped, shown, unit
from parcompiler.schedules.action import LETTERS

if TYPE_CHECKING:
    from parcompiler.report.report import Report

MOST = 4000  # more bars than this are slow to move
TOP, ROW, LANE = -0.39, 0.62, 0.14  # heights, of 1 for each rank
PALEST = 0.45  # the white in the colour of a rank's last stage
COMPUTED = COMPUTE | HEAD | EMBEDDING | {Kind.UPDATE}
LANES = {  # what runs beside the compute
    "messages": (MESSAGES, GREY),
    "vocabulary": (TRANSFERS | {Kind.EXCHANGE}, GREEN),
    "gradients summed": (frozenset({Kind.REDUCE_GRADIENTS}), PURPLE),
}
NAMES = {
    **WORDS,
    Kind.EMBED: "look up own rows",
    Kind.EMBED_BACKWARD: "gradients of own rows",
    Kind.UPDATE: "update",
}

Happened = Event | Ran
Span = tuple[float, float]  # from and to a second of the step


def predicted(report: Report) -> Figure:
    """The simulated step."""
    return _timeline(report, report.trail.events, "predicted")


def measured(report: Report) -> Figure | None:
    """The measured step on the same scale; None where none was recorded."""
    events = report.measurement.events if report.measurement else ()
    return _timeline(report, events, "measured") if events else None


def is_picture(report: Report) -> bool:
    """Whether the step has too many instructions to draw each of them as a bar."""
    return len(report.trail.events) > MOST


def _timeline(report: Report, events: Iterable[Happened], name: str) -> Figure:
    """The chart of a step."""
    scale, symbol = unit(_longest(report), SECONDS)
    long = [event for event in events if event.end > event.begin]
    if is_picture(report):
        traces = [*_pictures(long, scale), *_legend(long)]
    else:
        traces = [*_bars(report, long, scale), *_waits(long, scale), *_lanes(long, scale)]
    ranks = len(report.ranks)
    layout = {
        "barmode": "overlay",
        "height": 92 + ranks * (34 if ranks <= 8 else 24),
        "xaxis": {
            "title": {"text": f"{name} time ({symbol})"},
            "range": [0, _longest(report) / scale],
            "zeroline": False,
        },
        "yaxis": axis_of_ranks(ranks),
        "uniformtext": {"mode": "hide", "minsize": 9},
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
        "margin": {"t": 30, "b": 44},
    }
    return Figure(traces, layout)


def _longest(report: Report) -> float:
    """The end of the longer of the predicted and the measured step."""
    every: list[Happened] = [*report.trail.events]
    if report.measurement is not None:
        every += report.measurement.events
    return max((event.end for event in every), default=0.0) or report.step.seconds or 1.0


def _bars(report: Report, events: Sequence[Happened], scale: float) -> Iterator[dict[str, Any]]:
    """The compute: bars of one kind together; of later stages on a rank they are paler."""
    several = len(report.stages) > len(report.ranks)
    later = _later(report)
    groups: dict[tuple[Kind, int], list[Happened]] = defaultdict(list)
    for event in events:
        if event.kind in COMPUTED:
            groups[event.kind, later.get(event.instruction.stage, 0)].append(event)
    order = [*NAMES]
    for kind, turn in sorted(groups, key=lambda key: (order.index(key[0]), key[1])):
        own = groups[kind, turn]
        color = paler(KINDS[kind], PALEST * turn / max(1, max(later.values())))
        yield {
            **_bar(own, _working, scale, TOP, ROW),
            "name": NAMES[kind],
            "legendgroup": kind.value,
            "showlegend": turn == min(other for key, other in groups if key == kind),
            "text": [_label(event.instruction, several) for event in own],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "insidetextfont": {"color": ink(color), "size": 11},
            "marker": {"color": color, "line": {"width": 0.6}},
        }


def _later(report: Report) -> dict[int | None, int]:
    """How many stages its rank has before each stage."""
    count: dict[int, int] = defaultdict(int)
    found: dict[int | None, int] = {}
    for j, stage in enumerate(report.stages):
        found[j] = count[stage.rank]
        count[stage.rank] += 1
    return found


def _waits(events: Iterable[Happened], scale: float) -> Iterator[dict[str, Any]]:
    """The measured time in which compute waits for messages."""
    own = [event for event in events if _waited(event) > 0 and event.kind in COMPUTED]
    if own:
        pattern = {"shape": "/", "fgcolor": GREY, "bgcolor": "rgba(0,0,0,0)", "size": 6}
        marker = {"color": GREY, "pattern": pattern, "line": {"width": 0.6}}
        yield {**_bar(own, _waiting, scale, TOP, ROW), "name": "waiting", "marker": marker}


def _waited(event: Happened) -> float:
    """The seconds at the begin of an instruction in which it waits for messages."""
    return event.waited if isinstance(event, Ran) else 0.0


def _whole(event: Happened) -> Span:
    return event.begin, event.end


def _waiting(event: Happened) -> Span:
    return event.begin, event.begin + _waited(event)


def _working(event: Happened) -> Span:
    return event.begin + _waited(event), event.end


def _lanes(events: Sequence[Happened], scale: float) -> Iterator[dict[str, Any]]:
    """What runs beside the compute, in the lane below."""
    for name, (kinds, color) in LANES.items():
        own = [event for event in events if event.kind in kinds]
        if own:
            marker = {"color": color, "opacity": 0.75, "line": {"width": 0}}
            yield {
                **_bar(own, _whole, scale, TOP + ROW + 0.04, LANE),
                "name": name,
                "marker": marker,
            }


def _bar(
    events: Sequence[Happened],
    span: Callable[[Happened], Span],
    scale: float,
    offset: float,
    width: float,
) -> dict[str, Any]:
    """Bars of the spans of events."""
    spans = [*map(span, events)]
    return {
        "type": "bar",
        "orientation": "h",
        "base": [shown(begin / scale) for begin, _ in spans],
        "x": [shown(max(0.0, end - begin) / scale) for begin, end in spans],
        "y": [event.rank for event in events],
        "offset": offset,
        "width": width,
        "hovertext": [_hover(event) for event in events],
        "hoverinfo": "text",
        "cliponaxis": True,
    }


def _pictures(events: Sequence[Happened], scale: float) -> Iterator[dict[str, Any]]:
    """The compute of each rank as an image, which is fast for any number of instructions."""
    kinds = _present(events)
    number = {kind: k for k, kind in enumerate(kinds)}
    share = 1 / len(kinds) if kinds else 1.0
    colors = [[share * (k + side), KINDS[kind]] for k, kind in enumerate(kinds) for side in (0, 1)]
    rows: dict[int, list[Happened]] = defaultdict(list)
    for event in events:
        if event.kind in number:
            rows[event.rank].append(event)
    for rank, own in sorted(rows.items()):
        edges, cells = [0.0], list[Happened | None]()
        for event in sorted(own, key=lambda event: event.begin):
            begin, end = shown(event.begin / scale), shown(event.end / scale)
            if begin > edges[-1]:
                edges.append(begin)
                cells.append(None)
            if end > edges[-1]:
                edges.append(end)
                cells.append(event)
        yield {
            "type": "heatmap",
            "x": edges,
            "y": [rank - ROW / 2, rank + ROW / 2],
            "z": [[number[cell.kind] + 0.5 if cell else None for cell in cells]],
            "hovertext": [[_hover(cell) if cell else "" for cell in cells]],
            "hoverinfo": "text",
            "hoverongaps": False,
            "zmin": 0,
            "zmax": len(kinds),
            "colorscale": colors,
            "showscale": False,
        }


def _legend(events: Sequence[Happened]) -> Iterator[dict[str, Any]]:
    """What the colours of a picture mean."""
    for kind in _present(events):
        marker = {"color": KINDS[kind]}
        yield {"type": "bar", "x": [None], "y": [None], "name": NAMES[kind], "marker": marker}


def _present(events: Iterable[Happened]) -> list[Kind]:
    """The kinds of compute that appear."""
    kinds = {event.kind for event in events}
    return [kind for kind in NAMES if kind in kinds]


def _label(line: Instruction, several: bool) -> str:
    """What stands on a bar: `F3`, or `2F3` where ranks have several stages."""
    stage = str(line.stage) if several and line.stage is not None else ""
    return f"{stage}{LETTERS[line.kind]}{line.microbatch}" if line.kind in LETTERS else ""


def _hover(event: Happened) -> str:
    """What is said of an instruction: name, micro-batch, times."""
    line = event.instruction
    begin, end = (quantity(second, SECONDS) for second in (event.begin, event.end))
    said = [f"<b>{escaped(event.text)}</b>", f"rank {event.rank}"]
    if line.microbatch is not None:
        said[-1] += f", micro-batch {line.microbatch}"
    said.append(f"{quantity(event.end - event.begin, SECONDS)}, from {begin} to {end}")
    if _waited(event) > 0:
        said.append(f"waited {quantity(_waited(event), SECONDS)} of it for messages")
    return "<br>".join(said)
