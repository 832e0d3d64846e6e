"""Measurements in a file, line by line."""

import json
from pathlib import Path

import pytest

from parcompiler.calibrate.journal import Journal
from parcompiler.errors import InputError


def test_what_was_added_is_there_for_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    Journal(path, "core").add("matmul", 0.5)
    again = Journal(path, "core")
    assert (again.get("matmul"), again.get("attention"), len(again)) == (0.5, None, 1)


def test_the_last_of_two_measurements_counts(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "kept", "core")
    journal.add("matmul", 0.5)
    journal.add("matmul", 0.25)
    assert Journal(journal.path, "core").get("matmul") == 0.25


def test_measurements_of_another_machine_stay_and_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    Journal(path, "core").add("matmul", 0.5)
    other = Journal(path, "other core")
    assert other.get("matmul") is None
    other.add("matmul", 0.125)
    assert Journal(path, "core").get("matmul") == 0.5


def test_a_line_that_was_cut_off_is_none_and_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    journal = Journal(path, "core")
    journal.add("matmul", 0.5)
    journal.add("attention", 0.5)
    path.write_text(path.read_text()[:-9])
    torn = Journal(path, "core")
    assert (torn.get("matmul"), torn.get("attention")) == (0.5, None)
    torn.add("attention", 0.75)
    again = Journal(path, "core")
    assert (again.get("matmul"), again.get("attention")) == (0.5, 0.75)


@pytest.mark.parametrize("seconds", ["fast", -1.0, 0.0, float("nan"), None, True])
def test_a_line_without_seconds_is_none(tmp_path: Path, seconds: object) -> None:
    path = tmp_path / "kept"
    line = {"machine": "core", "work": "matmul", "seconds": seconds}
    path.write_text(json.dumps(line) + "\n[]\n7\n")
    assert len(Journal(path, "core")) == 0


def test_a_fresh_journal_forgets(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    Journal(path, "core").add("matmul", 0.5)
    assert len(Journal(path, "core", fresh=True)) == 0
    assert len(Journal(path, "core")) == 0


def test_a_journal_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the measurements"):
        Journal(tmp_path, "core")
