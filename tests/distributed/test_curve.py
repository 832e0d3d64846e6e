"""Training with the vocabulary on all ranks follows the loss curve of one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vocabulary" / "curve.py"


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("optimizer", [("AdamW", "3e-4"), ("SGD", "0.1")], ids="".join)
def test_two_hundred_steps_have_the_losses_of_one_process(optimizer: tuple[str, str]) -> None:
    name, rate = optimizer
    found = subprocess.run(
        [sys.executable, str(SCRIPT), "--optimizer", name, "--lr", rate],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    rows = [line.strip("| ").split(" | ") for line in found.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["one process", "vocab-1", "vocab-2"]
    for _, steps, first, last, worst, _ in rows:
        assert int(steps) == 200
        assert float(last) < float(first) - 1
        assert float(worst) <= 1e-4
