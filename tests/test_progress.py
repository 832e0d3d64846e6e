"""Progress names and times each step on a terminal, and is silent in a pipe."""

import io
import re
import sys

import pytest

from parcompiler.progress import Progress


class Terminal(io.StringIO):
    """Standard error as a terminal."""

    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, wanted: bool = True) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(wanted) as steps:
        with steps("capture"):
            pass
        with steps("pass [red]shard"):
            pass
    return re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", stream.getvalue())


def test_steps_are_named_and_timed_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    last = shown(monkeypatch, Terminal()).split("\r")[-1]
    assert re.fullmatch(r"✓ capture +\d\.\d s\n✓ pass \[red\]shard +\d\.\d s\n", last)


def test_a_step_that_fails_has_no_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with (
        pytest.raises(ValueError, match="invalid literal"),
        Progress(True) as steps,
        steps("capture"),
    ):
        int("no")
    assert "capture" in stream.getvalue()
    assert "✓" not in stream.getvalue()


def test_nothing_is_shown_in_a_pipe_or_when_it_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert shown(monkeypatch, io.StringIO()) == ""
    assert shown(monkeypatch, Terminal(), wanted=False) == ""
