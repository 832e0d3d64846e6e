"""Runs whose ranks are killed at any time, and started again from the newest checkpoint, end with
the weights of the run that nobody has disturbed."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parcompiler.runtime.checkpoint import folder as folders
from tests.distributed.test_checkpoints import RESUMED, assert_equal

KILLS = int(os.environ.get("KILLS", "200"))
STEPS = 400
ROOT = Path(__file__).parents[2]


def start(script: Path, size: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """All ranks of an emitted script."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT),
        "TORCH_CPP_LOG_LEVEL": "FATAL",
    }  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, str(script), "--steps", str(STEPS), *arguments],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(size)
    ]


def end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.sweep
@pytest.mark.timeout(7200)
def test_runs_that_are_killed_end_as_if_they_were_not(tmp_path: Path) -> None:
    case, draw = RESUMED["vocab-2"], random.Random(0)
    case.export(tmp_path / "out")
    script = tmp_path / "out" / "main.py"
    first = ("--save", str(tmp_path / "first"), "--steps", "1")  # all go on from its seeds
    rest = ("--save", str(tmp_path / "straight"), "--resume", str(tmp_path / "first"))
    for options in (first, rest):
        straight = start(script, case.ranks, *options)
        assert [process.wait(600) for process in straight] == [0] * case.ranks
        end(straight)
    expected = folders.read(folders.find(tmp_path / "straight"))
    kills, runs = 0, 0
    while kills < KILLS:
        runs += 1
        folder = tmp_path / f"run_{runs}"
        shutil.copytree(tmp_path / "first", folder)
        arguments = ("--save", str(folder), "--every", "1", "--keep", "2", "--resume", "auto")
        while True:
            processes = start(script, case.ranks, *arguments)
            try:
                output = processes[0].stdout
                assert output is not None
                assert output.readline().startswith("going on from step")
                deadline = time.monotonic() + draw.uniform(0.0, 4.0)
                while time.monotonic() < deadline and processes[0].poll() is None:
                    time.sleep(0.005)
                if processes[0].poll() is not None:
                    break
                processes[draw.randrange(case.ranks)].send_signal(signal.SIGKILL)
                kills += 1
                time.sleep(draw.uniform(0.0, 0.5))  # the others do something until they notice
            finally:
                end(processes)
            for path in folders.complete(folder):
                assert folders.damaged(path) == []
        found = folders.read(folders.find(folder))
        assert found.step == STEPS
        assert_equal(found, expected)
    print(f"\n{kills} kills of {runs} runs")
