"""Starts scripts under torchrun, on this machine, and returns what they printed."""

import os
import subprocess
import sys
from pathlib import Path


def torchrun(ranks: int, script: Path, *arguments: str, ok: bool = True) -> str:
    """Standard output and error of `script` run as `ranks` processes."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(Path(__file__).parent.parent.parent),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    found = subprocess.run(
        [*command, str(script), *arguments],
        cwd=script.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    text = found.stdout + found.stderr
    assert (found.returncode == 0) is ok, text
    return text
