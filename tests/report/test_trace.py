"""The trace: what Perfetto needs of every event, and the simulated step in it."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parcompiler.instruction import Kind
from parcompiler.report import Report
from tests.report.programs import Made, odd, small_gpt, small_t5
from tests.report.test_report import slower

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


MEANT = {  # by phase: what must be there beyond who and when, in "Trace Event Format"
    "X": {"dur"},
    "C": {"args"},
    "M": {"args"},
    "s": {"id", "cat"},
    "f": {"id", "cat", "bp"},
}
METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}


def faults(events: list[dict[str, Any]]) -> Iterator[str]:
    """What a reader of "Trace Event Format" would not take, or would misplace."""
    begun: dict[tuple[str, int], dict[str, Any]] = {}
    for event in events:
        phase = event["ph"]
        for missing in sorted({"pid", "tid", "ts", "name"} | MEANT[phase] - event.keys()):
            if missing not in event:
                yield f"{event} lacks {missing}"
        if type(event["pid"]) is not int or type(event["tid"]) is not int:
            yield f"{event}: a process and a thread are integers"
        times = [event["ts"], event.get("dur", 0)]
        if any(type(value) not in (int, float) or not 0 <= value < 1e15 for value in times):
            yield f"{event}: a time is a number of microseconds"
        if phase == "M" and event["args"].keys() != {METADATA[event["name"]]}:
            yield f"{event}: unknown metadata"
        if phase == "C" and not all(type(v) in (int, float) for v in event["args"].values()):
            yield f"{event}: a counter counts"
        if phase == "s":
            begun[event["cat"], event["id"]] = event
        if phase == "f":
            start = begun.pop((event["cat"], event["id"]), None)
            if start is None or start["name"] != event["name"] or start["ts"] > event["ts"]:
                yield f"{event}: an arrow ends where none began"
    yield from (f"{event}: an arrow that does not end" for event in begun.values())


def test_the_format_is_that_of_chrome_and_perfetto(made: Made, tmp_path: Path) -> None:
    report = made.report.measured(1.5 * made.timeline.step_time, slower(made, 1.5))
    assert list(faults(events_of(report, tmp_path))) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.pop("dur") if e["ph"] == "X" else None,
        lambda e: e.update(ts="1") if e["ph"] == "X" else None,
        lambda e: e.update(id=-1) if e["ph"] == "f" else None,
        lambda e: e.update(args={"bytes": "2 GiB"}) if e["ph"] == "C" else None,
        lambda e: e.update(pid="rank 0"),
    ],
)
def test_the_check_of_the_format_finds_what_is_wrong(
    change: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> None:
    events = events_of(small_gpt().report, tmp_path)
    for event in events:
        change(event)
    assert list(faults(events)) != []


def test_a_measured_step_has_processes_of_its_own(made: Made, tmp_path: Path) -> None:
    traces = slower(made, 1.5)
    report = made.report.measured(1.5 * made.timeline.step_time, traces)
    events, ranks = events_of(report, tmp_path), len(report.ranks)
    plain = events_of(made.report, tmp_path)
    assert [event for event in events if event["pid"] < ranks] == plain
    own = [event for event in events if event["pid"] >= ranks and event["ph"] == "X"]
    assert len(own) == sum(map(len, traces)) > 0
    assert all("waited" in event["args"] for event in own)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names[ranks] == "rank 0, measured"


def test_a_report_from_json_writes_the_same_trace(made: Made, tmp_path: Path) -> None:
    again = Report.from_json(made.report.to_json())
    made.report.to_trace(tmp_path / "first.json")
    again.to_trace(tmp_path / "second.json")
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "second.json").read_bytes()
