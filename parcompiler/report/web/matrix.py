"""What ranks send each other in a step: from the row to the column, in bytes."""

from __future__ import annotations

from collections import Counter

from parcompiler.instruction import Kind
from parcompiler.report.data import ReportData
from parcompiler.report.units import BYTES, quantity
from parcompiler.report.web.figure import Figure, axis_of_ranks

NAMED = 12  # more ranks than these leave no room for figures


def matrix(report: ReportData) -> Figure | None:
    """Cells as dark as much is sent; None where nothing is."""
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
