"""Emitted scripts whose ranks are ended at any time, and started again from the newest checkpoint,
end with the weights of the run that nobody has disturbed."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from parcompiler.runtime.checkpoint import folder as folders
from tests.distributed.forked import script, start
from tests.distributed.test_checkpoints import RESUMED, Case, assert_equal

KILLS = int(os.environ.get("KILLS", "200"))
STEPS = 60
LONGEST = 4.0  # s from the start of the ranks to a kill
STAGES = {  # of a rank, by schedule
    "naive": 1, "gpipe": 1, "1f1b": 1, "zb-h1": 1, "zb-h2": 1, "zb-v": 2, "v-half": 2, "v-min": 2,
    "interleaved": 2,
}  # fmt: skip
CASES = RESUMED | {
    f"{schedule} {precision}": Case(
        2,
        options={"schedule": schedule, "virtual_stages": stages, "precision": precision},
        dropout=0.1,
    )
    for schedule, stages in STAGES.items()
    for precision in ("fp32", "fp16")
}
CASES |= {
    f"{vocabulary} fp16": Case(
        2, options={"vocabulary": vocabulary, "precision": "fp16"}, dropout=0.1
    )
    for vocabulary in ("naive", "vocab-1", "vocab-2", "interlaced")
}
CASES |= {
    f"zero {zero} {vocabulary}": Case(
        2, 2, options={"zero": zero, "vocabulary": vocabulary, "precision": "fp16"}, dropout=0.1
    )
    for zero in (0, 1, 2, 3)
    for vocabulary in ("whole", "vocab-2")
}
CASES["pipedream"] = Case(4, options={"schedule": "pipedream"}, dropout=0.1, tied=False)


def undisturbed(case: Case, folder: Path, save: str, *arguments: str) -> list[str]:
    """The losses of a program whose ranks nobody kills, which saves into a folder."""
    given = ("--seed", "3", "--save", str(folder / save), *arguments)
    ranks = start(case.ranks, folder, script, str(folder / "out" / "main.py"), *given)
    for process in ranks:
        process.join(600)
    log = (folder / "log_0").read_text()
    assert [process.exitcode for process in ranks] == [0] * case.ranks, log
    return [line for line in log.splitlines() if line.startswith("step ")]


def saved(folder: Path) -> folders.Checkpoint:
    """The newest checkpoint in a folder."""
    path = folders.find(folder)
    assert folders.damaged(path) == []
    return folders.read(path)


def killed(case: Case, out: Path, run: Path, draw: random.Random) -> Counter[str]:
    """Train in spite of kills; how many, and how many while a checkpoint was written."""
    arguments = ["--save", str(run), "--every", "1", "--keep", "2", "--resume", "auto"]
    arguments += ["--steps", str(STEPS), "--seed", "3", "--flight", str(run.parent)]
    kills: Counter[str] = Counter()
    longest, before = LONGEST, folders.complete(run)
    while True:
        ranks = start(case.ranks, run.parent, script, str(out / "main.py"), *arguments)
        ranks[0].join(draw.uniform(0.0, longest))
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
        after = folders.complete(run)
        assert [fault for path in after for fault in folders.damaged(path)] == []
        if ended:
            return kills
        # Where a machine is so busy that ranks have not begun, they are given more time.
        longest, before = LONGEST if after != before else 1.5 * longest, after


@pytest.mark.sweep
@pytest.mark.timeout(7200)
def test_runs_that_are_killed_end_as_if_they_were_not(tmp_path: Path) -> None:
    draw, total, expected = random.Random(0), Counter[str](), {}
    for name, case in RESUMED.items():
        case.export(tmp_path / name / "out")
        undisturbed(case, tmp_path / name, "straight", "--steps", str(STEPS))
        expected[name] = saved(tmp_path / name / "straight")
    for number, (name, case) in enumerate(itertools.cycle(RESUMED.items())):
        run = tmp_path / name / f"run_{number}"
        total += killed(case, tmp_path / name / "out", run, draw)
        found = saved(run)
        assert found.step == STEPS
        assert_equal(found, expected[name])
        print(f"{number + 1} runs, {dict(total)}", flush=True)
        if total["kills"] >= KILLS:
            return


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_are_ten_and_ten_in_new_processes(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    case.export(tmp_path / "out")
    straight = undisturbed(case, tmp_path, "straight", "--steps", "20")
    first = undisturbed(case, tmp_path, "run", "--steps", "10")
    second = undisturbed(case, tmp_path, "run", "--steps", "20", "--resume", "auto")
    assert len(second) == 10
    assert first + second == straight
    assert_equal(saved(tmp_path / "run"), saved(tmp_path / "straight"))
