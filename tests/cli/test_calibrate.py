"""`parcompiler calibrate`: the file, what is said of it, and what an interruption leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import parcompiler as pc
from parcompiler.calibrate import measure
from parcompiler.cli import run

ROOT = Path(__file__).parents[2]
TINY = ("--sizes", "1", "--seconds", "1e-4", "--dtypes", "float32")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure nothing: each work takes 2 ms."""
    monkeypatch.setattr(measure, "seconds_of", lambda *_: 0.002)


def test_a_device_is_written_and_its_figures_are_shown_with_their_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    assert run(["calibrate", "--output", str(path), "--name", "cpu-mine", *TINY]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == pc.Device.load(path).name == "cpu-mine"
    assert any(line.startswith("  launch of") and line.endswith(" measured") for line in lines)
    assert any(
        line.startswith("  link,") and line.endswith("not measured, as cpu") for line in lines
    )
    assert f"--device {path}" in lines[-1]
    assert err == ""
    assert run(["calibrate", "--output", str(path), *TINY, "--format", "json"]) == 0
    assert pc.Device.from_json(capsys.readouterr().out) == pc.Device.load(path)


def test_a_plan_takes_the_device_that_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    assert run(["calibrate", "--output", str(path), "--quiet", *TINY]) == 0
    capsys.readouterr()
    plan = ["plan", "tests.cli.models:make", "--mesh", "pipeline=2", "--schedule", "1f1b"]
    assert run([*plan, "--vocabulary", "whole", "--device", str(path), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["mesh"]["device"] == "cpu-measured"


def test_an_interruption_keeps_what_is_measured_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.001, 0.001])

    def interrupted(*_: object) -> float:
        try:
            return next(times)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(measure, "seconds_of", interrupted)
    path = tmp_path / "mine.json"
    assert run(["calibrate", "--output", str(path), *TINY]) == 130
    kept = tmp_path / "mine.json.measurements.jsonl"
    err = capsys.readouterr().err
    assert err.strip() == f"interrupted\nwhat was measured is kept in {kept}: run again to go on"
    assert len(kept.read_text().splitlines()) == 2
    assert not path.exists()


@pytest.mark.sweep
def test_ranks_of_torchrun_measure_their_messages_and_the_first_speaks(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    calibrate = ["-m", "parcompiler", "calibrate", "--output", str(path), *TINY]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    found = subprocess.run(
        [*command, *calibrate], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("cpu-measured\n") == 1
    sources = dict(pc.Device.load(path).sources)
    assert sources["link.bandwidth"].startswith("measured on ")
    assert "efficiency.curves" in sources
