"""The trace: what Perfetto needs of every event, and the simulated step in it."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from parcompiler.instruction import Kind
from parcompiler.report import Report
from tests.report.programs import Made, odd, small_gpt, small_t5

PROGRAMS = {"gpt": small_gpt, "t5": small_t5, "odd": odd}


def events_of(report: Report, folder: Path) -> list[dict[str, Any]]:
    """The events of the trace that a report writes."""
    path = folder / "trace.json"
    report.to_trace(path)
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data.keys() == {"displayTimeUnit", "traceEvents"}
    events: list[dict[str, Any]] = data["traceEvents"]
    return events


@pytest.fixture(params=PROGRAMS)
def made(request: pytest.FixtureRequest) -> Made:
    """Each program in turn."""
    return PROGRAMS[request.param]()


def test_every_event_says_what_when_and_where(made: Made, tmp_path: Path) -> None:
    for event in events_of(made.report, tmp_path):
        assert event.keys() >= {"ph", "ts", "pid", "tid", "name"}
        assert event["ph"] in {"M", "X", "C", "s", "f"}
        assert 0 <= event["ts"] <= 1e6 * made.timeline.step_time + 1e-3
        assert 0 <= event["pid"] < len(made.report.ranks)
        assert event["ph"] != "X" or event["dur"] >= 0


def test_each_message_has_a_slice_at_both_ends_and_an_arrow_between(
    made: Made, tmp_path: Path
) -> None:
    events = events_of(made.report, tmp_path)
    slices = {(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] == "X"}
    arrows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            arrows[event["id"]].append(event)
            assert (event["pid"], event["tid"], event["ts"]) in slices
    sends = [e for e in made.timeline.events if e.instruction.kind is Kind.SEND]
    assert len(arrows) == len(sends) > 0
    for pair in arrows.values():
        assert sorted(event["ph"] for event in pair) == ["f", "s"]
        assert pair[0]["pid"] != pair[1]["pid"]
        assert len({event["name"] for event in pair}) == 1


def test_slices_of_one_track_do_not_overlap(made: Made, tmp_path: Path) -> None:
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events_of(made.report, tmp_path):
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():
        end = 0.0
        for event in sorted(track, key=lambda event: (event["ts"], event["dur"])):
            assert event["ts"] >= end - 2e-3, "to the rounding of a nanosecond"
            end = event["ts"] + event["dur"]


def test_every_track_that_is_used_has_a_name_and_no_other(made: Made, tmp_path: Path) -> None:
    events = events_of(made.report, tmp_path)
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"}
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == used


def test_the_counter_shows_the_peak_of_memory(made: Made, tmp_path: Path) -> None:
    peaks: dict[int, int] = defaultdict(int)
    for event in events_of(made.report, tmp_path):
        if event["ph"] == "C":
            peaks[event["pid"]] = max(peaks[event["pid"]], event["args"]["bytes"])
    assert tuple(peaks[rank] for rank in sorted(peaks)) == made.timeline.peak_memory


def test_a_report_from_json_writes_the_same_trace(made: Made, tmp_path: Path) -> None:
    again = Report.from_json(made.report.to_json())
    made.report.to_trace(tmp_path / "first.json")
    again.to_trace(tmp_path / "second.json")
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "second.json").read_bytes()
