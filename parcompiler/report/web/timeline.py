"""A step as a chart: a row for each rank, time from left to right, messages in a lane below it.

rank 0  [F0][F1]....[B0][  B1  ]      a bar for each instruction, labelled if there is room;
           -- --       --  --         for very many an image without the lanes
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from parcompiler.instruction import GROUP, MESSAGES, Instruction, Kind
from parcompiler.report.data import ReportData
from parcompiler.report.events import StepEvent
from parcompiler.report.gantt import WORDS
from parcompiler.report.units import SECONDS, quantity, unit
from parcompiler.report.web.charts import Figure, axis_of_ranks, axis_to, escaped, shown
from parcompiler.report.web.colors import GREEN, GREY, KINDS, PURPLE, ink, paler
from parcompiler.schedules.action import LETTERS
from parcompiler.timeline.timeline import BUSY

MOST = 4000  # more bars would make the chart slow
TOP, ROW, LANE = -0.39, 0.62, 0.14  # heights, where a rank has height 1
PALEST = 0.45  # the white in the colour of a rank's last stage
LANES = {  # instructions beside the compute
    "messages": (MESSAGES, GREY),
    "vocabulary": (GROUP, GREEN),
    "gradients summed": (frozenset({Kind.REDUCE_GRADIENTS}), PURPLE),
    "parameters gathered": (frozenset({Kind.UNSHARD, Kind.GATHER_PARAMETERS}), PURPLE),
}
NAMES = {
    **WORDS,
    Kind.EMBED: "look up the rank's rows",
    Kind.EMBED_BACKWARD: "gradients of the rank's rows",
}

Trace = dict[str, Any]  # of plotly


def predicted(report: ReportData) -> Figure:
    """The simulated step."""
    return _timeline(report, report.trail.events, "predicted")


def measured(report: ReportData) -> Figure | None:
    """The measured step on the same scale; None if none was recorded."""
    events = report.measurement.events if report.measurement else ()
    return _timeline(report, events, "measured") if events else None


def is_picture(report: ReportData) -> bool:
    """Whether the step has too many instructions to draw each of them as a bar."""
    return len(report.trail.events) > MOST


def _timeline(report: ReportData, events: Iterable[StepEvent], name: str) -> Figure:
    """The chart of a step, on the scale of the longer of the predicted and the measured one."""
    every = [*report.trail.events, *(report.measurement.events if report.measurement else ())]
    longest = max((event.end for event in every), default=0.0) or report.step.seconds or 1.0
    scale, symbol = unit(longest, SECONDS)
    long = [event for event in events if event.end > event.begin]
    if is_picture(report):
        traces = [*_pictures(long, scale), *_legend(long)]
    else:
        traces = [*_bars(report, long, scale), *_beside(long, scale)]
    ranks = len(report.ranks)
    layout = {
        "barmode": "overlay",
        "height": 92 + ranks * (34 if ranks <= 8 else 24),
        "xaxis": axis_to(longest / scale, f"{name} time ({symbol})"),
        "yaxis": axis_of_ranks(ranks),
        "uniformtext": {"mode": "hide", "minsize": 9},
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
        "margin": {"t": 30, "b": 44},
    }
    return Figure(traces, layout)


def _bars(report: ReportData, events: Sequence[StepEvent], scale: float) -> Iterator[Trace]:
    """The compute: one trace of bars for each kind; bars of a rank's later stages are paler."""
    several = len(report.stages) > len(report.ranks)
    count: Counter[int] = Counter()  # stages of each rank so far
    place: dict[int | None, int] = {}  # index of each stage among those of its rank
    for j, stage in enumerate(report.stages):
        place[j] = count[stage.rank]
        count[stage.rank] += 1
    groups: dict[tuple[Kind, int], list[StepEvent]] = defaultdict(list)
    for event in events:
        if event.kind in BUSY:
            groups[event.kind, place.get(event.instruction.stage, 0)].append(event)
    order = [*NAMES]
    for kind, k in sorted(groups, key=lambda key: (order.index(key[0]), key[1])):
        color = paler(KINDS[kind], PALEST * k / max(1, *place.values()))
        yield {
            **_bar(groups[kind, k], _work_begin, _end, scale, TOP, ROW),
            "name": NAMES[kind],
            "legendgroup": kind.value,
            "showlegend": k == min(other for key, other in groups if key == kind),
            "text": [_label(event.instruction, several) for event in groups[kind, k]],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "insidetextfont": {"color": ink(color), "size": 11},
            "marker": {"color": color, "line": {"width": 0.6}},
        }


def _beside(events: Sequence[StepEvent], scale: float) -> Iterator[Trace]:
    """The time in which measured compute waits for messages, and the instructions in the lane
    below."""
    waiting = [event for event in events if event.waited and event.kind in BUSY]
    if waiting:
        pattern = {"shape": "/", "fgcolor": GREY, "bgcolor": "rgba(0,0,0,0)", "size": 6}
        marker = {"color": GREY, "pattern": pattern, "line": {"width": 0.6}}
        bar = _bar(waiting, _begin, _work_begin, scale, TOP, ROW)
        yield {**bar, "name": "waiting", "marker": marker}
    for name, (kinds, color) in LANES.items():
        in_lane = [event for event in events if event.kind in kinds]
        if in_lane:
            bar = _bar(in_lane, _begin, _end, scale, TOP + ROW + 0.04, LANE)
            lane = {"color": color, "opacity": 0.75, "line": {"width": 0}}
            yield {**bar, "name": name, "marker": lane}


_begin, _end = attrgetter("begin"), attrgetter("end")


def _work_begin(event: StepEvent) -> float:
    return event.begin + (event.waited or 0.0)


def _bar(
    events: Sequence[StepEvent],
    begin: Callable[[StepEvent], float],
    end: Callable[[StepEvent], float],
    scale: float,
    offset: float,
    width: float,
) -> Trace:
    """Bars of events, from one time to another."""
    return {
        "type": "bar",
        "orientation": "h",
        "base": [shown(begin(event) / scale) for event in events],
        "x": [shown(max(0.0, end(event) - begin(event)) / scale) for event in events],
        "y": [event.rank for event in events],
        "offset": offset,
        "width": width,
        "hovertext": [_hover(event) for event in events],
        "hoverinfo": "text",
        "cliponaxis": True,
    }


def _pictures(events: Sequence[StepEvent], scale: float) -> Iterator[Trace]:
    """The compute of each rank as an image, which is fast for any number of instructions."""
    kinds = _present(events)
    number = {kind: k for k, kind in enumerate(kinds)}
    share = 1 / len(kinds) if kinds else 1.0
    colors = [[share * (k + side), KINDS[kind]] for k, kind in enumerate(kinds) for side in (0, 1)]
    rows: dict[int, list[StepEvent]] = defaultdict(list)
    for event in events:
        if event.kind in number:
            rows[event.rank].append(event)
    for rank, events_of_rank in sorted(rows.items()):
        edges, cells = [0.0], list[StepEvent | None]()
        for event in sorted(events_of_rank, key=lambda event: event.begin):
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


def _legend(events: Sequence[StepEvent]) -> Iterator[Trace]:
    """The legend of an image."""
    for kind in _present(events):
        marker = {"color": KINDS[kind]}
        yield {"type": "bar", "x": [None], "y": [None], "name": NAMES[kind], "marker": marker}


def _present(events: Iterable[StepEvent]) -> list[Kind]:
    """The kinds of compute that appear."""
    kinds = {event.kind for event in events}
    return [kind for kind in NAMES if kind in kinds]


def _label(line: Instruction, several: bool) -> str:
    """The label of a bar: `F3`, or `2F3` where ranks have several stages."""
    stage = str(line.stage) if several and line.stage is not None else ""
    return f"{stage}{LETTERS[line.kind]}{line.microbatch}" if line.kind in LETTERS else ""


def _hover(event: StepEvent) -> str:
    """The hover text of an instruction: name, micro-batch, times."""
    line = event.instruction
    begin, end = (quantity(second, SECONDS) for second in (event.begin, event.end))
    said = [f"<b>{escaped(event.text)}</b>", f"rank {event.rank}"]
    if line.microbatch is not None:
        said[-1] += f", micro-batch {line.microbatch}"
    said.append(f"{quantity(event.end - event.begin, SECONDS)}, from {begin} to {end}")
    if event.waited:
        said.append(f"waited {quantity(event.waited, SECONDS)} of it for messages")
    return "<br>".join(said)
