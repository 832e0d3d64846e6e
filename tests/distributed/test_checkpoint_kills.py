"""Runs whose ranks are killed at any time, and started again from the newest checkpoint, end with
the weights of the run that nobody has disturbed."""

from __future__ import annotations

import itertools
import os
import random
import runpy
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from parcompiler.runtime.checkpoint import folder as folders
from tests.distributed.by_hand import start
from tests.distributed.test_checkpoints import RESUMED, Case, assert_equal

KILLS = int(os.environ.get("KILLS", "200"))
STEPS = 60
LONGEST = 4.0  # s from the start of the ranks to a kill


def script(path: str, *arguments: str) -> None:
    """Run an emitted script."""
    sys.argv, sys.path[0] = [path, "--steps", str(STEPS), *arguments], str(Path(path).parent)
    runpy.run_path(path, run_name="__main__")


def undisturbed(case: Case, folder: Path) -> folders.Checkpoint:
    """The last checkpoint of a program whose ranks nobody kills."""
    case.export(folder / "out")
    main = str(folder / "out" / "main.py")
    given = ("--seed", "3", "--save", str(folder / "straight"))
    ranks = start(case.ranks, folder, script, main, *given)
    for process in ranks:
        process.join(600)
        assert process.exitcode == 0, (folder / "log_0").read_text()
    return folders.read(folders.find(folder / "straight"))


def killed(case: Case, out: Path, run: Path, draw: random.Random) -> Counter[str]:
    """Train in spite of kills; how many, and how many while a checkpoint was written."""
    arguments = ["--save", str(run), "--every", "1", "--keep", "2", "--resume", "auto"]
    arguments = [str(out / "main.py"), "--seed", "3", "--flight", str(run.parent), *arguments]
    kills: Counter[str] = Counter()
    while True:
        ranks = start(case.ranks, run.parent, script, *arguments)
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
            assert not ended or process.exitcode == 0, (run.parent / "log_0").read_text()
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
