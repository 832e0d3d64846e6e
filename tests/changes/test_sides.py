"""What a comparison reads, and what it says of time and memory."""

import dataclasses
import json
from pathlib import Path

import pytest

from parcompiler.changes import Comparison, Prediction, Side, read, written
from parcompiler.changes.side import digest
from parcompiler.plan import Plan
from tests.report.programs import Made, small_gpt


@pytest.fixture
def made() -> Made:
    return small_gpt()


def test_a_plan_is_written_with_figures_that_its_reader_may_ignore(
    made: Made, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(written(made.plan, made.report))
    side = read(path)
    assert Plan.from_json(path.read_text()) == side.plan == made.plan
    assert side.prediction is not None
    assert side.prediction == Prediction.of(made.plan, made.report)
    assert side.prediction.seconds == made.report.step.seconds
    assert side.prediction.peak == max(rank.peak_memory for rank in made.report.ranks)


def test_the_same_plan_is_read_from_a_folder_and_from_what_was_printed(
    made: Made, tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_text(made.plan.to_json())
    (tmp_path / "report.json").write_text(made.report.to_json())
    plan, report = (json.loads(item.to_json()) for item in (made.plan, made.report))
    (tmp_path / "all.json").write_text(json.dumps({"plan": plan, "report": report}))
    for path in (tmp_path, tmp_path / "all.json"):
        side = read(path)
        assert (side.plan, side.prediction) == (made.plan, Prediction.of(made.plan, made.report))


def test_figures_of_a_plan_that_was_edited_since_are_left_out(made: Made, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    data = json.loads(written(made.plan, made.report))
    path.write_text(json.dumps(data | {"microbatches": 16}))
    assert read(path).prediction is None
    assert "edited after its figures were predicted" in read(path).why
    folder = tmp_path / "out"
    folder.mkdir()
    edited = dataclasses.replace(made.plan, recompute=("norm+embedding",))
    (folder / "plan.json").write_text(edited.to_json())
    (folder / "report.json").write_text(made.report.to_json())
    assert read(folder).prediction is None
    assert "edited after its report was made" in read(folder).why


def test_the_report_of_an_earlier_release_has_no_figures_to_compare() -> None:
    side = read(Path(__file__).parents[1] / "golden" / "old_export")
    assert (side.plan.schedule, side.prediction) == ("1f1b", None)
    assert side.why == "its report is of an earlier release"


def test_a_comparison_without_figures_says_why(made: Made, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(made.plan.to_json())
    text = str(Comparison.of(read(path), read(path)))
    assert "The plans are the same." in text
    assert f"No predicted time and memory of {path}: it is a plan alone." in text


def test_time_and_memory_stand_side_by_side(made: Made) -> None:
    one = Prediction(digest(made.plan), 2e-3, 0.10, 0.40, (2**30, 2**29), 2**34)
    other = dataclasses.replace(one, seconds=1e-3, idle=0.15, memory=(2**29, 3 * 2**29))
    sides = Side("a", made.plan, one), Side("b\x1b[31m", made.plan, other)
    text = str(Comparison.of(*sides))
    lines = {line.split("  ")[1]: line.split() for line in text.splitlines() if line[:2] == "  "}
    assert lines["time of a step"][-6:] == ["2.00", "ms", "1.00", "ms", "-50.0", "%"]
    assert lines["idle, mean of the ranks"][-2:] == ["+5.0", "points"]
    assert lines["FLOPs used (MFU)"][-1] == "same"
    assert lines["memory of the fullest rank"][-2:] == ["+50.0", "%"]
    assert text.isascii()
    assert "\x1b" not in text
    data = Comparison.of(*sides).data()
    assert data["equal"] is True
    assert data["after"]["predicted"]["seconds"] == 1e-3
