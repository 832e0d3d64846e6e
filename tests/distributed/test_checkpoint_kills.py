"""Runs whose ranks are killed at any time, and started again from the newest checkpoint, end with
the weights of the run that nobody has disturbed."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import runpy
import socket
import sys
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from parcompiler.runtime.checkpoint import folder as folders
from tests.distributed.test_checkpoints import RESUMED, Case, assert_equal

KILLS = int(os.environ.get("KILLS", "200"))
STEPS = 60
LONGEST = 4.0  # s from the start of the ranks to a kill
# Ranks are forked from a process that has imported torch: a start takes a second, not five.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch._dynamo", "parcompiler.runtime"])


def rank_of(script: Path, environment: dict[str, str], arguments: list[str]) -> None:
    """Become a rank of an emitted script."""
    os.environ |= environment
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.parent)
    log = os.open(
        script.parent / f"log_{environment['RANK']}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    runpy.run_path(str(script), run_name="__main__")


def start(script: Path, size: int, *arguments: str) -> list[BaseProcess]:
    """All ranks of an emitted script."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    given = ["--steps", str(STEPS), "--seed", "3", *arguments]
    ranks: list[BaseProcess] = []
    for rank in range(size):
        environment = {**address, **quiet, "RANK": str(rank)}
        process = FORKS.Process(target=rank_of, args=(script, environment, given), daemon=True)
        process.start()
        ranks.append(process)
    return ranks


def undisturbed(case: Case, folder: Path) -> folders.Checkpoint:
    """The last checkpoint of a program whose ranks nobody kills."""
    case.export(folder / "out")
    ranks = start(folder / "out" / "main.py", case.ranks, "--save", str(folder / "straight"))
    for process in ranks:
        process.join(600)
        assert process.exitcode == 0, (folder / "out" / "log_0").read_text()
    return folders.read(folders.find(folder / "straight"))


def killed(case: Case, out: Path, run: Path, draw: random.Random) -> Counter[str]:
    """Train in spite of kills; how many, and how many while a checkpoint was written."""
    arguments = ("--save", str(run), "--every", "1", "--keep", "2", "--resume", "auto")
    kills: Counter[str] = Counter()
    while True:
        ranks = start(out / "main.py", case.ranks, *arguments)
        ranks[0].join(draw.uniform(0.0, LONGEST))
        ended = ranks[0].exitcode is not None
        if not ended:
            kills["saving"] += any(run.glob(".step_*.partial"))
            kills["kills"] += 1
            ranks[draw.randrange(case.ranks)].kill()
            time.sleep(draw.uniform(0.0, 0.5))  # the others do something until they notice
        for process in ranks:
            process.join(60 if ended else 0)
            process.kill()
            process.join()
            assert not ended or process.exitcode == 0, (out / "log_0").read_text()
        for path in folders.complete(run):
            assert folders.damaged(path) == []
        if ended:
            return kills


@pytest.mark.sweep
@pytest.mark.timeout(7200)
def test_runs_that_are_killed_end_as_if_they_were_not(tmp_path: Path) -> None:
    draw, total = random.Random(0), Counter[str]()
    expected = {name: undisturbed(case, tmp_path / name) for name, case in RESUMED.items()}
    for number, (name, case) in enumerate(itertools.cycle(RESUMED.items())):
        run = tmp_path / name / f"run_{number}"
        total += killed(case, tmp_path / name / "out", run, draw)
        found = folders.read(folders.find(run))
        assert found.step == STEPS
        assert_equal(found, expected[name])
        print(f"{number + 1} runs, {dict(total)}", flush=True)
        if total["kills"] >= KILLS:
            return
