"""The report: its figures against the program they describe, its text and JSON as golden files."""

import dataclasses
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.text import Text

import parcompiler as pc
from parcompiler.cli import output
from parcompiler.data_updates import DataUpdates
from parcompiler.errors import InputError
from parcompiler.instruction import Instruction, Kind
from parcompiler.passes.zero import DataShare
from parcompiler.plan import MeshChoice, Method, VocabularyChoice, Weighed
from parcompiler.report import Report, alternatives
from parcompiler.report.data import RowShare, TensorCollective
from parcompiler.report.events import MeasuredStep
from parcompiler.report.units import BYTES, SECONDS, column, quantity
from parcompiler.report.web import pages
from parcompiler.runtime.interpreter import InstructionTime
from tests import zoo
from tests.report.programs import Made, odd, odd_on_slow_device, small_gpt, small_t5

PROGRAMS = {"gpt": small_gpt, "t5": small_t5, "odd": odd, "slow": odd_on_slow_device}
WIDTHS = (80, 100, 200)
Golden = Callable[[str, str], None]


def slower(made: Made, factor: float) -> list[list[InstructionTime]]:
    """A trace in which everything took longer than predicted, by a factor."""
    traces: list[list[InstructionTime]] = [[] for _ in made.timeline.bubble]
    for event in made.timeline.events:
        begin, end = factor * event.begin, factor * event.end
        traces[event.rank].append(InstructionTime(event.instruction, begin, end))
    return traces


def measured_gpt() -> Report:
    """The report of the GPT with a step that took half as long again."""
    made = small_gpt()
    return made.report.measured(1.5 * made.timeline.step_time, slower(made, 1.5))


# Figures


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_step_is_that_of_the_simulation(name: str) -> None:
    made = PROGRAMS[name]()
    report, timeline = made.report, made.timeline
    assert report.step.seconds == pytest.approx(timeline.step_time)
    assert [rank.idle for rank in report.ranks] == pytest.approx(timeline.bubble)
    assert tuple(rank.peak_memory for rank in report.ranks) == timeline.peak_memory
    busy = sum(1 - idle for idle in timeline.bubble) / len(timeline.bubble)
    assert report.step.ideal == pytest.approx(busy * timeline.step_time)


@pytest.mark.parametrize("name", PROGRAMS)
def test_bytes_sent_are_those_of_the_instruction_lists(name: str) -> None:
    made = PROGRAMS[name]()
    sizes = {name: value.nbytes for name, value in made.lowered.values.items()}
    for stage, lines in zip(made.report.stages, made.lowered.instructions, strict=True):
        sends = [line for line in lines if line.kind is Kind.SEND and line.microbatch == 0]
        for gradient, found in ((False, stage.sent), (True, stage.sent_back)):
            wanted = [line.value for line in sends if line.gradient is gradient]
            assert found == sum(sizes[value] for value in wanted if value)


@pytest.mark.parametrize(("name", "counts"), [("gpt", [2, 1]), ("t5", [8] * 4), ("odd", [3, 2, 1])])
def test_micro_batches_in_flight_are_those_of_the_schedule(name: str, counts: list[int]) -> None:
    assert [stage.in_flight for stage in PROGRAMS[name]().report.stages] == counts


def test_tied_parameters_count_once_in_the_model_and_on_each_stage_that_holds_them() -> None:
    report = small_gpt().report
    tied = 512 * 64
    assert sum(stage.parameters for stage in report.stages) == report.model.parameters + tied
    (shared,) = report.shared
    assert (shared.name, shared.aliases) == ("embedding.weight", ("head.weight",))
    assert shared.ranks == (0, 1)


def test_flops_are_those_of_matrices_and_little_more() -> None:
    # 6 · parameters · tokens, and attention: 12 · layers · sequence · hidden · tokens.
    report = small_gpt().report
    tokens, positions = 4 * 2 * 32, 32 * 64
    wanted = tokens * (6 * (report.model.parameters - positions) + 12 * 4 * 32 * 64)
    assert report.step.flops == pytest.approx(wanted, rel=0.1)
    full = report.step.flops / (2 * report.mesh.peak)
    assert report.step.mfu == pytest.approx(full / report.step.seconds)


def test_samples_and_tokens_are_left_out_where_they_cannot_be_told() -> None:
    assert (small_gpt().report.step.rows, small_gpt().report.step.tokens) == (8, 256)
    assert small_t5().report.step.tokens is None  # of the encoder or of the decoder?
    assert odd().report.step.tokens is None


def test_the_tokens_of_context_ranks_are_those_of_whole_rows() -> None:
    model, inputs = zoo.build("gpt")
    mesh = pc.Mesh(context=2)
    step = pc.compile(model, mesh, inputs, microbatches=4, schedule="1f1b").report().step
    rows, sequence = inputs["tokens"].shape
    assert (step.rows, step.tokens) == (4 * rows, 4 * rows * sequence)


def test_what_deserves_a_second_look_is_found() -> None:
    report = odd().report
    assert report.model.random
    assert report.model.frozen == 72 + 18  # the head, and what nothing reads
    assert len(report.unread) == 6
    assert [(item.operator, item.blocks) for item in report.estimated] == [("aten.squeeze_.dim", 6)]
    assert [(item.name, item.stages) for item in report.recomputed] == [("mask", (0, 1, 2))]


def test_what_is_cheaper_to_send_is_sent_and_said() -> None:
    report = odd_on_slow_device().report
    assert [value.targets for value in report.values if value.cheaper] == [(1, 2)]
    assert not report.recomputed
    assert "Sent, because recomputing costs more" in report.to_text()


def test_a_division_that_the_user_gave_has_no_bound() -> None:
    lines = [line for line in small_t5().report.to_text().splitlines() if "  given" in line]
    assert lines == ["  solver            given, by its own estimate of 5.20 ms"]
    assert any("gap 5.0 %" in line for line in small_gpt().report.to_text().splitlines())


def test_a_pipeline_of_one_rank_has_no_sections_about_traffic() -> None:
    made = small_gpt()
    alone = dataclasses.replace(made.report, values=(), shared=())
    text = alone.to_text()
    assert "Values between stages" not in text
    assert "Shared weights" not in text


# Text


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["gpt", "t5"])
def test_text_is_golden(name: str, width: int, golden: Golden) -> None:
    golden(f"report/{name}/{width}.txt", PROGRAMS[name]().report.to_text(width))


def test_text_of_a_measured_step_is_golden(golden: Golden) -> None:
    golden("report/gpt/measured.txt", measured_gpt().to_text())


def test_text_of_odd_models_is_golden(golden: Golden) -> None:
    golden("report/odd/100.txt", odd().report.to_text())


@pytest.mark.parametrize("width", [60, *WIDTHS])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_line_is_too_long_and_no_number_is_cut(name: str, width: int) -> None:
    report = PROGRAMS[name]().report
    text = report.to_text(width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert text.isascii()
    assert text == text.strip() + "\n"
    if width >= 80:
        assert words_of_figures(text) == words_of_figures(report.to_text(400))


@pytest.mark.parametrize("width", [60, 80])
def test_a_table_that_is_too_wide_goes_on_below_and_no_number_is_cut(width: int) -> None:
    report = small_gpt().report
    sizes = (2**20 * 3 // 4, 2**21)
    busy = (
        dataclasses.replace(stage, sent=size, sent_back=size)
        for stage, size in zip(report.stages, sizes, strict=True)
    )
    report = dataclasses.replace(report, stages=(*busy,) * 6)
    work = next(p for p in report.to_text(width).split("\n\n") if p.startswith("Work"))
    whole = next(p for p in report.to_text(400).split("\n\n") if p.startswith("Work"))
    lines, tables = work.splitlines(), work.count("stage")
    assert tables > whole.count("stage") == 1
    assert max(map(cell_len, lines)) <= width
    figures = [word for line in whole.splitlines()[4:] for word in line.split()[1:]]
    found = [word for line in lines if line.split()[0].isdigit() for word in line.split()[1:]]
    assert sorted(found) == sorted(figures)
    assert sum(line.split()[0] == "11" for line in lines) == tables, "each part names the rows"


def words_of_figures(text: str) -> list[str]:
    """The words of the tables that are never wrapped."""
    figures = ("Step", "Work", "Memory")
    sections = (part.split() for part in text.split("\n\n") if part.startswith(figures))
    return [word for words in sections for word in words if not set(word) <= {"-"}]


def test_a_pipe_gets_plain_text_of_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")
    report = small_gpt().report
    text = str(report)
    assert "\x1b" not in text
    assert max(map(cell_len, text.splitlines())) <= 100
    *screen, more = text.split("\n\n")
    assert "report.to_text()" in more
    every = report.to_text(100).rstrip().split("\n\n")
    assert [part for part in screen if part not in every] == [screen[-2]], "the ranks in short"
    assert len(text.splitlines()) < 60


class Terminal(io.StringIO):
    """A standard output that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        """As a terminal answers."""
        return True


class Teletype(Terminal):
    """One without letters beyond ASCII."""

    encoding = "ascii"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A terminal of 90 columns with colours."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "90")
    return monkeypatch


def test_a_terminal_gets_colours_and_its_width(terminal: pytest.MonkeyPatch) -> None:
    terminal.setattr(sys, "stdout", Terminal())
    text = str(small_gpt().report)
    assert "\x1b[" in text
    assert "×" in text
    plain = Text.from_ansi(text).plain
    assert max(map(cell_len, plain.splitlines())) == 90, "the schedule fills the width"


def test_a_terminal_gets_no_escapes_from_names(terminal: pytest.MonkeyPatch) -> None:
    terminal.setattr(sys, "stdout", Terminal())
    text = str(odd().report)
    codes = set(re.findall(r"\x1b\[([0-9;]*)m", text))
    assert codes <= {"0", "1", "2", "32", "33", "34", "1;31"}
    rest = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert all(line.isprintable() for line in rest.splitlines())


def test_a_terminal_may_refuse_colours_and_letters(terminal: pytest.MonkeyPatch) -> None:
    terminal.setenv("NO_COLOR", "1")
    terminal.setattr(sys, "stdout", Teletype())
    text = str(odd().report)
    assert "\x1b" not in text
    assert text.isascii()


def test_rows_of_the_plan_have_its_figures_and_others_are_shifted_alike() -> None:
    report = small_gpt().report
    step, peak = report.step.seconds, max(rank.peak_memory for rank in report.ranks)
    half, less = step / 2, peak - 2**20
    methods = Method("whole", "1f1b", half, less), Method("vocab-2", "1f1b", half, less - 2**20)
    share = DataShare(1, 1, 1, 1, less, fits=True, step=half, exchange=1e-9, exposed=1e-9)
    plan = dataclasses.replace(
        report.plan,
        zero=1,
        weighed=(Weighed("1f1b", 1, half),),
        vocabulary=VocabularyChoice("whole", weighed=methods),
        runner_up=MeshChoice(2, 1, 1, 4, seconds=0.99 * half, schedule="gpipe"),
    )
    made = dataclasses.replace(report, plan=plan, levels=(share,))
    makers = (alternatives.schedules, 1), (alternatives.methods, 2), (alternatives.levels, 1)
    for make_table, count in makers:
        table = make_table(made)
        columns = {column.heading: [cell.text for cell in column.cells] for column in table.columns}
        steps = columns.get("step") or columns["step,\nestimated"]
        assert steps == [quantity(step, SECONDS)] * count
        if "fullest\nrank" in columns:
            bytes_of = [peak, peak - 2**20][:count]
            assert columns["fullest\nrank"] == column(bytes_of, BYTES)
    assert f"{quantity(step - 0.01 * half, SECONDS)}, 0.5 % shorter, but less" in made.to_text()


def test_sentences_have_no_dash_for_nothing() -> None:
    report = small_gpt().report
    hidden = TensorCollective(
        "Layer", 4, "rotation", "x", (2,), 10, False, seconds=1e-3, exposed=0.0, axis="context"
    )
    rows, mesh = RowShare("tokens", 32, 16), dataclasses.replace(report.mesh, context=2)
    made = dataclasses.replace(report, exchanged=(hidden,), rows=(rows,), mesh=mesh)
    assert "none of them beside no compute" in " ".join(made.to_text().split())
    updates = DataUpdates("asynchronous")
    plan = dataclasses.replace(report.plan, updates=updates)
    made = dataclasses.replace(report, plan=plan, server=(1024, 0))
    assert "1 KiB through its link in a step; each gradient" in " ".join(made.to_text().split())


def test_a_schedule_that_does_not_fit_is_not_drawn() -> None:
    report = small_t5().report
    assert "Schedule:" in report.to_text(80)
    assert "Schedule:" not in report.to_text(40)
    many = dataclasses.replace(report, ranks=report.ranks * 5)
    assert "Schedule:" not in many.to_text(200)


# JSON


@pytest.mark.parametrize("name", ["gpt", "t5"])
def test_json_is_golden(name: str, golden: Golden) -> None:
    golden(f"report/{name}/report.json", PROGRAMS[name]().report.to_json())


@pytest.mark.parametrize("name", PROGRAMS)
def test_json_gives_the_same_report_back(name: str) -> None:
    report = PROGRAMS[name]().report
    text = report.to_json()
    assert text.isascii()
    again = Report.from_json(text)
    assert again == report
    assert again.to_json() == text
    assert again.to_text() == report.to_text()


def test_a_measured_report_is_kept_too() -> None:
    report = measured_gpt()
    assert Report.from_json(report.to_json()) == report


def test_two_reports_of_the_same_program_are_the_same_bytes() -> None:
    made = small_t5()
    again = Report.of(made.problem, made.plan, made.lowered, made.timeline)
    assert again == made.report
    assert again.to_json() == made.report.to_json()


# Measured


def test_measured_times_stand_beside_the_predicted_ones() -> None:
    report, plain = measured_gpt(), small_gpt().report
    assert plain.measurement is None
    measurement = report.measurement
    assert measurement is not None
    assert measurement.seconds == pytest.approx(1.5 * report.step.seconds)
    wanted = [1.5 * stage.forward for stage in report.stages]
    assert measurement.forward == pytest.approx(wanted)
    assert "1.50x" in report.to_text()


def test_the_time_in_which_a_stage_waits_is_not_its_own() -> None:
    made = small_gpt()
    traces = [
        [r._replace(end=r.end + 1.0, waited=1.0) for r in trace] for trace in slower(made, 1.5)
    ]
    measurement = made.report.measured(1.0, traces).measurement
    assert measurement is not None
    assert measurement.forward == pytest.approx([1.5 * s.forward for s in made.report.stages])


def test_without_a_trace_the_step_alone_is_compared() -> None:
    report = small_gpt().report.measured(2e-3)
    assert report.measurement == MeasuredStep(2e-3)
    assert "measured" in report.to_text()
    assert "Predicted and measured" not in report.to_text()


def test_a_stage_without_records_is_left_open() -> None:
    made = small_gpt()
    traces = slower(made, 1.0)
    report = made.report.measured(2e-3, [traces[0], []])
    assert report.measurement is not None
    assert report.measurement.forward[1] is None
    assert Report.from_json(report.to_json()) == report


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_takes_a_positive_time(seconds: float) -> None:
    with pytest.raises(InputError, match="positive number of seconds"):
        small_gpt().report.measured(seconds)


def test_a_trace_may_be_of_all_ranks_of_the_mesh() -> None:
    made = small_gpt()
    wide = dataclasses.replace(made.report.mesh, data=2, tensor=2)
    report, own = dataclasses.replace(made.report, mesh=wide), slower(made, 1.5)
    every = [records for records in own for _ in range(4)]
    assert report.measured(1.0, every) == report.measured(1.0, own)
    assert len(report.measured(1.0, own).to_json()) > len(report.to_json())
    with pytest.raises(InputError, match="2 or 8 ranks, 4 given"):
        report.measured(1.0, every[:4])


def test_a_trace_is_of_this_program() -> None:
    with pytest.raises(InputError, match="2 ranks, 1 given"):
        small_gpt().report.measured(1.0, [[]])
    other = slower(small_t5(), 1.0)[:2]
    other[0].append(InstructionTime(Instruction(Kind.FORWARD, stage=3, microbatch=0), 0.0, 1.0))
    with pytest.raises(InputError, match="a stage 3"):
        small_gpt().report.measured(1.0, other)


def test_a_page_without_plotly_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pages._plotly.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(InputError, match=r"pip install 'parcompiler\[report\]'"):
        small_gpt().report.to_html(tmp_path / "report.html")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"pip install 'parcompiler\[report\]'"):
        output.check_page(tmp_path / "report.html")
