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
@pytest.mark.parametrize("starter", ["torchrun", "srun"])
def test_ranks_measure_their_messages_and_the_first_speaks(tmp_path: Path, starter: str) -> None:
    path = tmp_path / "two.json"
    calibrate = [sys.executable, "-m", "parcompiler", "calibrate", "--output", str(path), *TINY]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if starter == "torchrun":
        calibrate[1:1] = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
        tasks = [environment]
    else:
        step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost",
                "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": str(os.getpid())}  # fmt: skip
        tasks = [{**environment, **step, "SLURM_PROCID": n, "SLURM_LOCALID": n} for n in "10"]
    running = [
        subprocess.Popen(calibrate, cwd=ROOT, env=task, text=True, stdout=-1, stderr=-1)
        for task in tasks
    ]
    texts = [process.communicate() for process in running]
    assert not any(process.returncode for process in running), texts
    assert "".join(out for out, _ in texts).count("cpu-measured\n") == 1
    device = pc.Device.load(path)
    sources = dict(device.sources)
    assert device.devices_per_node == 2
    assert sources["link.bandwidth"].startswith("measured on ")
    assert "efficiency.curves" in sources
