"""A file that is no report is refused, by the name of the field that is wrong."""

import json
from typing import Any

import pytest

from parcompiler.errors import InputError
from parcompiler.report import Report
from tests.report.programs import small_gpt

Change = tuple[list[str | int], Any, str]

CHANGES: list[Change] = [
    (["version"], 1, "the report has version 1; this release reads 2: export the program again"),
    (["version"], True, "report.version must be an integer (true found)"),
    (["surprise"], 1, "report has an unknown field 'surprise'"),
    (["model"], None, "report.model must be an object (null found)"),
    (["model", "random"], 1, "report.model.random must be true or false (1 found)"),
    (["model", "name"], 3, "report.model.name must be a string (3 found)"),
    (["mesh", "memory"], 1.5, "report.mesh.memory must be an integer (1.5 found)"),
    (["mesh", "memory"], 0, "report.mesh.memory must be positive (0 found)"),
    (["values", 0, "targets"], [], "report.values[0].targets must be from 0 to 1"),
    (["step", "seconds"], "1", 'report.step.seconds must be a number ("1" found)'),
    (["step", "seconds"], float("nan"), "report.step.seconds must be a finite number (NaN"),
    (["stages"], {}, "report.stages must be a list ({} found)"),
    (["stages"], [], "must not be empty"),
    (["stages", 1, "blocks", 0], [], "report.stages[1].blocks[0] must be a string"),
    (["stages", 1, "rank"], 2, "report.stages[1].rank must be from 0 to 1 (2 found)"),
    (["values", 0, "targets"], [7], "report.values[0].targets must be from 0 to 1 (7 found)"),
    (["values", 0, "source"], -1, "report.values[0].source must be from 0 to 1 (-1 found)"),
    (["trail", "memory"], [], "report.trail.memory must have 2 entries (0 found)"),
    (["trail", "memory", 0, 0], "0.0", "report.trail.memory[0][0]: a level of memory reads"),
    (["trail", "memory", 0, 0], "-1.0 5", "report.trail.memory[0][0]: a level of memory reads"),
    (["trail", "events", 0], "0 1.0 0.5 SHARE_LOSS from 1", "report.trail.events[0]: an event"),
    (["trail", "events", 0], "0 0.0 0.5 DANCE stage 1", "report.trail.events[0]: an event reads"),
    (["trail", "events", 0], "0 0.0 inf SHARE_LOSS from 1", "report.trail.events[0]: an event"),
    (["trail", "events", 0], "9 0.0 0.5 SHARE_LOSS from 1", "report.trail.events[0]: rank must be"),
    (["trail", "events", 0], "0 0.0 0.5 SEND x mb 0 to 9", "report.trail.events[0]: peer must be"),
    (["trail", "events", 0], "0 0.0 0.5 FORWARD mb 0", "report.trail.events[0]: an event reads"),
    (
        ["measurement"],
        {"seconds": 1.0, "events": ["0 0.0 1.0 FORWARD stage 0 mb 0"]},
        "report.measurement.events[0] lacks the seconds waited",
    ),
    (
        ["measurement"],
        {"seconds": 1.0, "events": ["2 0.0 1.0 0.0 FORWARD stage 0 mb 0"]},
        "report.measurement.events[0]: rank must be from 0 to 1 (2 found)",
    ),
    (
        ["measurement"],
        {"seconds": 1, "forward": [1.0]},
        "report.measurement.forward must have 2 entries (1 found)",
    ),
]


@pytest.mark.parametrize(("place", "value", "message"), CHANGES)
def test_a_wrong_field_is_named(place: list[str | int], value: Any, message: str) -> None:
    data = json.loads(small_gpt().report.to_json())
    parent = data
    for key in place[:-1]:
        parent = parent[key]
    parent[place[-1]] = value
    with pytest.raises(InputError) as caught:
        Report.from_json(json.dumps(data))
    assert message in str(caught.value)


def test_a_missing_field_is_named() -> None:
    data = json.loads(small_gpt().report.to_json())
    del data["step"]["ideal"]
    with pytest.raises(InputError, match=r"report\.step lacks the field 'ideal'"):
        Report.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "hello", "[" * 60])
def test_a_text_that_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="the report is no JSON"):
        Report.from_json(text)


@pytest.mark.parametrize("text", ["[]", "1", "null", '"report"'])
def test_json_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="report must be an object"):
        Report.from_json(text)


def test_a_whole_number_of_seconds_is_a_number() -> None:
    data = json.loads(small_gpt().report.to_json())
    data["step"]["seconds"] = 2
    assert Report.from_json(json.dumps(data)).step.seconds == 2.0
