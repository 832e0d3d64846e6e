"""Starts scripts under torchrun, on this machine, and returns what they printed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT = 180  # s


def torchrun(ranks: int, script: Path, *arguments: str, ok: bool = True) -> str:
    """Standard output and error of `script` run as `ranks` processes."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(Path(__file__).parent.parent.parent),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    started = subprocess.Popen(
        [*command, str(script), *arguments],
        cwd=script.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        text = "".join(started.communicate(timeout=TIMEOUT))
    except subprocess.TimeoutExpired:
        started.terminate()  # torchrun then ends its ranks, which would run on if it were killed
        text = "".join(started.communicate(timeout=TIMEOUT))
        pytest.fail(f"{script.name} did not end in {TIMEOUT} s:\n{text}")
    assert (started.returncode == 0) is ok, text
    return text
