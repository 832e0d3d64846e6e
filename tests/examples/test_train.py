"""The loop of one's own trains as ranks that srun has started, goes on, and writes weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.distributed.forked import free_port

ROOT = Path(__file__).parents[2]


def by_srun(save: Path, steps: int) -> None:
    """Run the example in two processes that have what srun says, and nothing of torchrun's."""
    said = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(free_port()),
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore"}  # fmt: skip
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    options = ["--data", "docs/concepts", "--save", str(save), "--steps", str(steps)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "examples/train.py", *options], cwd=ROOT,
            env={**kept, **said, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [rank.wait(240) for rank in ranks] == [0, 0]


def test_the_example_trains_under_srun(tmp_path: Path) -> None:
    by_srun(tmp_path, 10)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [10]
    assert 3 < rows[0]["loss"] < 6
    assert (tmp_path / "weights" / "model.safetensors").exists()
