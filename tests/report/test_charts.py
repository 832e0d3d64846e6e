"""The charts of a page: plotly's schema holds for them, and what they draw is what is reported."""

import dataclasses
import html
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import asdict

import plotly.graph_objects as go
import pytest

from parcompiler.instruction import COMPUTE, Kind
from parcompiler.report import Report, sections
from parcompiler.report.data import ReportData
from parcompiler.report.events import Level, MeasuredStep, StepEvent, Trail
from parcompiler.report.overview import tiles
from parcompiler.report.table import Table, number, table, words
from parcompiler.report.units import BYTES, unit
from parcompiler.report.web import charts, colors, timeline
from parcompiler.report.web.charts import traffic
from parcompiler.report.web.pages import figures, page
from tests.report.programs import odd, small_gpt, small_t5
from tests.report.test_report import slower


def measured() -> Report:
    """A small report with a measured step."""
    made = small_t5()
    return made.report.measured(1.5 * made.timeline.step_time, slower(made, 1.5))


def crowded() -> Report:
    """A report with more events than are drawn as bars, and idle time between some of them."""
    report = small_gpt().report
    events = tuple(
        StepEvent(rank, 1e-3 * i, 1e-3 * i + length, f"FORWARD stage {rank} mb {i}")
        for i in range(timeline.MOST)
        for rank, length in ((0, 1e-3), (1, 5e-4))
    )
    levels = tuple(Level(1e-3 * k, 1000 + k) for k in range(timeline.MOST))
    return dataclasses.replace(report, trail=Trail(events, (levels, levels)))


def limited(memory: int) -> Report:
    """A report of devices with so much memory, the fullest of which needs 4.5 MiB."""
    report = small_gpt().report
    peak = dataclasses.replace(report.ranks[0], peak_memory=9 * 2**19)
    mesh = dataclasses.replace(report.mesh, memory=memory)
    return dataclasses.replace(report, mesh=mesh, ranks=(peak, report.ranks[1]))


@pytest.mark.parametrize("make", [measured, crowded, lambda: odd().report])
def test_plotly_accepts_all_charts(make: Callable[[], Report]) -> None:
    for name, figure in figures(make()).items():
        go.Figure(**asdict(figure))  # raises ValueError at what the schema does not have
        json.dumps(asdict(figure), allow_nan=False)
        assert figure.data, name


def test_each_compute_instruction_is_a_bar_from_its_begin_to_its_end() -> None:
    report = small_t5().report
    compute = [e for e in report.trail.events if e.kind in COMPUTE | {Kind.UPDATE}]
    bars = timeline.predicted(report).data
    drawn = {
        (trace["name"], rank, text): (base, base + length)
        for trace in bars
        if "text" in trace
        for rank, text, base, length in zip(
            trace["y"], trace["text"], trace["base"], trace["x"], strict=True
        )
    }
    assert len(drawn) == len(compute)
    names = {Kind.FORWARD: ("forward", "F"), Kind.BACKWARD: ("backward", "B")}
    for event in compute:
        word, letter = names.get(event.kind, ("update", ""))
        label = f"{letter}{event.instruction.microbatch}" if letter else ""
        begin, end = drawn[word, event.rank, label]
        assert begin == pytest.approx(1e3 * event.begin, abs=1e-5)
        assert end == pytest.approx(1e3 * event.end, abs=1e-5)


def test_messages_are_in_the_lane_of_their_sender() -> None:
    report = small_t5().report
    (lane,) = (trace for trace in timeline.predicted(report).data if trace["name"] == "messages")
    sends = [event for event in report.trail.events if event.kind is Kind.SEND]
    assert lane["y"] == [event.rank for event in sends]


def test_both_steps_have_the_same_scale_and_what_was_waited_for_is_said() -> None:
    report = measured()
    first, second = timeline.predicted(report), timeline.measured(report)
    assert second is not None
    assert first.layout["xaxis"]["range"] == second.layout["xaxis"]["range"]
    assert report.measurement is not None
    late = dataclasses.replace(report.measurement.events[0], begin=1e-3, end=4e-3, waited=2e-3)
    measurement = dataclasses.replace(report.measurement, events=(late,))
    chart = timeline.measured(dataclasses.replace(report, measurement=measurement))
    assert chart is not None
    work, wait = chart.data
    assert (work["base"], work["x"]) == ([3.0], [1.0])
    assert (wait["name"], wait["base"], wait["x"]) == ("waiting", [1.0], [2.0])
    assert work["hovertext"] == wait["hovertext"]
    assert "waited 2.00 ms of it for messages" in work["hovertext"][0]


def test_a_step_that_was_not_recorded_has_no_chart() -> None:
    assert timeline.measured(small_gpt().report) is None
    assert timeline.measured(small_gpt().report.measured(1.0)) is None
    assert 'data-figure="measured"' not in page(small_gpt().report)


def test_very_many_instructions_become_one_picture_a_rank() -> None:
    report = crowded()
    assert timeline.is_picture(report)
    pictures = [trace for trace in timeline.predicted(report).data if trace["type"] == "heatmap"]
    assert len(pictures) == 2
    for trace, cells in zip(pictures, (timeline.MOST, 2 * timeline.MOST - 1), strict=True):
        (row,), (hover,) = trace["z"], trace["hovertext"]
        assert len(row) == len(hover) == len(trace["x"]) - 1 == cells
        assert sum(cell is not None for cell in row) == timeline.MOST
        assert trace["x"] == sorted(trace["x"])


def test_the_curve_of_memory_keeps_its_peaks() -> None:
    report = crowded()
    lines = charts.memory(report).data
    assert len(lines[0]["x"]) <= charts.MOST + 2
    peak = max(level.nbytes for level in report.trail.memory[0])
    scale = unit(max(rank.peak_memory for rank in report.ranks), BYTES)[0]
    assert max(lines[0]["y"]) == pytest.approx(peak / scale, rel=1e-6)


def test_the_limit_is_drawn_where_it_is_near_and_said_where_it_is_far() -> None:
    near, far = limited(2**22), limited(2**40)
    assert charts.memory(near).layout["shapes"]
    assert charts.memory(near).data[-1]["name"] == "limit 4 MiB"
    assert charts.fullest(near) == "Rank 0 fills its memory the most: 4.50 MiB of 4 MiB."
    assert charts.memory(far).layout["shapes"] == []
    assert charts.fullest(far).endswith("4.50 MiB of 1 TiB; the limit is far above this chart.")


def test_the_matrix_counts_every_message_with_its_bytes() -> None:
    made = small_t5()
    sizes = {name: value.nbytes for name, value in made.lowered.values.items()}
    wanted: dict[tuple[int, int], int] = {}
    for event in made.timeline.events:
        line = event.instruction
        if line.kind is Kind.SEND:
            assert line.peer is not None
            assert line.value is not None
            pair = event.rank, line.peer
            wanted[pair] = wanted.get(pair, 0) + sizes[line.value]
    assert traffic(made.report) == wanted
    assert len(wanted) > 3


def ranks_of(text: str) -> list[str]:
    """The ranks in the picture of the mesh."""
    cells = re.findall(r'<td class="ranks">(.*?)</td>', text)
    return [name for cell in cells for name in re.findall("<span>(.*?)</span>", cell)]


def test_the_row_of_blocks_and_the_mesh_name_every_block_and_rank() -> None:
    report = small_t5().report
    assert re.findall(r'<span title="(.*?)">', page(report)) == [
        block for stage in report.stages for block in stage.blocks
    ]
    wide = dataclasses.replace(report, mesh=dataclasses.replace(report.mesh, data=2, tensor=3))
    assert ranks_of(page(wide)) == [*map(str, range(24))]
    wider = dataclasses.replace(report, mesh=dataclasses.replace(report.mesh, data=8, tensor=8))
    assert ranks_of(page(wider))[1] == "64 … 127"


@pytest.mark.parametrize(
    ("limit", "style", "note"),
    [
        (2**22, "error", "too much: 112.5 % of 4 MiB, rank 0"),
        (19 * 2**18, "warning", "94.7 % of 4.75 MiB, rank 0"),
        (9 * 2**20, "", "50.0 % of 9 MiB, rank 0"),
    ],
)
def test_too_much_memory_is_an_alarm(limit: int, style: str, note: str) -> None:
    (tile,) = (tile for tile in tiles(limited(limit)) if tile.name == "Peak memory")
    assert (tile.style, tile.note) == (style, note)


def contrast(first: str, second: str) -> float:
    """How well one colour is read on another, from 1 to 21 (WCAG 2.2, contrast ratio)."""
    dark, light = sorted(map(colors.luminance, (first, second)))
    return (light + 0.05) / (dark + 0.05)


def test_colours_can_be_told_apart_and_text_on_them_read() -> None:
    for color in {*colors.STAGES, *colors.KINDS.values()}:
        assert contrast(color, colors.ink(color)) >= 4.5
        pale = colors.paler(color, timeline.PALEST)
        assert contrast(pale, colors.ink(pale)) >= 4.5
    assert len({*colors.STAGES}) == len(colors.STAGES)
    for first, second in itertools.pairwise((*colors.STAGES, colors.STAGES[0])):
        assert contrast(first, second) > 1.25, "also without any colour"


def nothing_happens() -> Report:
    """A report that JSON may hold: no event, no second, no byte."""
    report = small_gpt().report
    idle = tuple(dataclasses.replace(rank, peak_memory=0) for rank in report.ranks)
    step = dataclasses.replace(report.step, seconds=0.0, rows=None, tokens=None)
    empty = Trail((), ((),) * len(idle))
    return dataclasses.replace(report, ranks=idle, step=step, trail=empty, values=(), shared=())


def all_ranks_update() -> Report:
    """A measured step of an asynchronous schedule."""
    report = small_gpt().report
    lines = ("FORWARD stage 0 mb 0", "BACKWARD stage 0 mb 0", "UPDATE stage 0 mb 0", "S mb 0")
    events = tuple(StepEvent(0, float(k), k + 1.0, line, 0.0) for k, line in enumerate(lines))
    return dataclasses.replace(report, measurement=MeasuredStep(9.0, events=events))


@pytest.mark.parametrize("make", [nothing_happens, all_ranks_update])
def test_every_report_has_a_page_and_a_summary(make: Callable[[], Report]) -> None:
    report = make()
    assert report.model.name in page(report)
    assert report.model.name in report._repr_html_()
    for figure in figures(report).values():
        go.Figure(**asdict(figure))


def test_all_tables_of_the_text_are_on_the_page_also_those_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = small_t5().report

    def shapes(_: ReportData) -> Table:
        return table("Shapes of hats", words("hat", ["bowler"]))

    def hats(_: ReportData) -> Table:
        return table("Hats considered", words("hat", ["top"]), number("of\nleast", ["1.00×"]))

    monkeypatch.setitem(sections.TABLES, "Mad hats", (shapes,))
    several = (*sections.TABLES[sections.ALTERNATIVES], hats)
    monkeypatch.setitem(sections.TABLES, sections.ALTERNATIVES, several)
    text = page(report)
    for made in (make(report) for makes in sections.TABLES.values() for make in makes):
        assert (f"<h3>{html.escape(made.title)}</h3>" in text) == bool(made.rows)
    assert (
        text.index(">Alternatives</h2>")
        < text.index("Hats considered")
        < text.index(">Mad hats</h2>")
    )
