"""Whatever a rank does that the others do not, down to its death: all end and say which it was.

Nobody ends those that are left: the ranks are started by hand, and rank 0 has their store.
"""

from __future__ import annotations

import random
import re
import signal
import statistics
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import parcompiler as pc
from parcompiler.models import gpt
from tests.distributed.by_hand import started

WAITED = re.compile(r"waited too long \(2 s\): in call \d+ \(step\), waiting at '.*' since [\d:]+;")
LONGEST = 10.0  # s from a death to the error of the last rank
SPREAD = {"vocabulary": "vocab-2", "schedule": "1f1b"}

# What the axes of the mesh are, and how it is compiled.
PLANS: dict[str, tuple[pc.Mesh, dict[str, Any]]] = {
    "pipeline 2": (pc.Mesh(pipeline=2), {}),
    "tensor 2": (pc.Mesh(tensor=2), {}),
    "data 2": (pc.Mesh(data=2), {}),
    "data 2, zero 1": (pc.Mesh(data=2), {"zero": 1}),
    "data 2, zero 3": (pc.Mesh(data=2), {"zero": 3}),
    "data 3, asynchronous": (pc.Mesh(data=3), {"updates": "asynchronous"}),
    "pipeline 2, vocab-2": (pc.Mesh(pipeline=2), SPREAD),
    "pipeline 2, pipedream": (pc.Mesh(pipeline=2), {"schedule": "pipedream"}),
    "pipeline 4": (pc.Mesh(pipeline=4), {}),
    "pipeline 4, vocab-2": (pc.Mesh(pipeline=4), SPREAD),
    "pipeline 2 x tensor 2": (pc.Mesh(pipeline=2, tensor=2), {}),
    "pipeline 2 x tensor 2, vocab-2": (pc.Mesh(pipeline=2, tensor=2), SPREAD),
    "pipeline 2 x data 2": (pc.Mesh(pipeline=2, data=2), {}),
    "data 2 x tensor 2": (pc.Mesh(data=2, tensor=2), {}),
    "pipeline 2, interleaved": (
        pc.Mesh(pipeline=2), {"schedule": "interleaved", "virtual_stages": 2},
    ),
    "pipeline 2, zb-v": (pc.Mesh(pipeline=2), {"schedule": "zb-v", "virtual_stages": 2}),
    "pipeline 4, interlaced": (
        pc.Mesh(pipeline=4), {"vocabulary": "interlaced", "schedule": "1f1b"},
    ),
    "pipeline 2 x data 2 x tensor 2": (pc.Mesh(pipeline=2, data=2, tensor=2), {}),
    "pipeline 8": (pc.Mesh(pipeline=8), {}),
    "pipeline 4 x data 2, vocab-2": (pc.Mesh(pipeline=4, data=2), SPREAD),
}  # fmt: skip
EXAMPLES = [
    ("pipeline 2 x tensor 2, vocab-2", 0),
    ("pipeline 2, vocab-2", 1),
    ("data 3, asynchronous", 1),
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The exported program of a plan."""

    @cache
    def folder(plan: str) -> Path:
        mesh, options = PLANS[plan]
        torch.manual_seed(0)
        config = gpt.Config(8, 2, 16, vocabulary=32, sequence=8, tied=False)
        tokens = torch.randint(32, (2, 8))
        inputs = {"tokens": tokens, "labels": tokens}
        program = pc.compile(gpt.GPT(config), mesh, inputs, microbatches=4, **options)
        return program.export(tmp_path_factory.mktemp("killed") / "out")

    return folder


def killed(folder: Path, size: int, rank: int) -> float:
    """Kill a rank at some time within its steps; the seconds until the last of the others ends,
    each with its last instructions written."""
    flight = folder / f"flight {rank}"
    with started(folder, size, "", "600", str(flight)) as ranks:
        ranks.ready()
        time.sleep(random.uniform(0.0, 1.5))
        ranks.send(rank, signal.SIGKILL)
        said, seconds = ranks.ends(rank)
    assert all(f"because rank {rank} is gone" in text for text in said.values()), said
    assert len([*flight.iterdir()]) == size - 1
    assert seconds < LONGEST
    return seconds


@pytest.mark.parametrize(("plan", "rank"), EXAMPLES)
def test_a_killed_rank_ends_the_others_which_name_it(
    plan: str, rank: int, folder_of: Callable[[str], Path]
) -> None:
    killed(folder_of(plan), PLANS[plan][0].size, rank)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_every_rank_is_killed_in_turn(folder_of: Callable[[str], Path]) -> None:
    print(f"\n{'plan':34} ranks kills longest median (s)")
    for plan, (mesh, _) in PLANS.items():
        seconds = [killed(folder_of(plan), mesh.size, rank) for rank in range(mesh.size)]
        median = statistics.median(seconds)
        figures = f"{mesh.size:5} {len(seconds):5} {max(seconds):7.1f} {median:6.1f}"
        print(f"{plan:34} {figures}", flush=True)


@pytest.mark.sweep
@pytest.mark.parametrize("call", ["evaluation", "gather"])
@pytest.mark.parametrize("plan", ["pipeline 2", "tensor 2", "data 2", "pipeline 4, vocab-2"])
def test_a_call_that_one_rank_makes_is_named(
    plan: str, call: str, folder_of: Callable[[str], Path]
) -> None:
    way = "an evaluation on rank 0" if call == "evaluation" else "gather on rank 0"
    with started(folder_of(plan), PLANS[plan][0].size, way) as ranks:
        ranks.ready()
        said, seconds = ranks.ends()
    assert "call 3 is" in said[1], said
    assert seconds < LONGEST


@pytest.mark.sweep
@pytest.mark.parametrize("plan", ["pipeline 2", "tensor 2", "pipeline 2, vocab-2"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stands_still_is_silent_not_gone(
    plan: str, rank: int, folder_of: Callable[[str], Path]
) -> None:
    stopped(folder_of(plan), rank)


def stopped(folder: Path, rank: int) -> None:
    with started(folder, 2, "", "2") as ranks:
        ranks.ready()
        ranks.send(rank, signal.SIGSTOP)
        said, seconds = ranks.ends(rank)
    text = said[1 - rank]
    if rank == 0:  # it has the store
        assert "rank 0, which has the store of this run, is silent" in text
    else:
        assert WAITED.search(text), text
        assert re.search(r"; rank 1 is silent, stopped or in .* \(last seen at [\d:]+ ", text), text
    assert seconds < 2 + 1.5 * LONGEST


def test_a_rank_that_is_stopped_is_named_and_where_the_others_wait(
    folder_of: Callable[[str], Path],
) -> None:
    stopped(folder_of("pipeline 2, vocab-2"), 1)


@pytest.mark.parametrize(
    ("way", "where"),
    [
        ("a loader that sleeps on rank 1", r"idle after call 2 \(step\) since [\d:]+, in asleep"),
        (
            "a module that sleeps on rank 1",
            r"in call 3 \(step\), at 'FORWARD stage 1 mb \d' since [\d:]+, in asleep",
        ),
    ],
)
def test_who_keeps_the_others_waiting_is_named_with_the_line_of_code(
    way: str, where: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    with started(folder_of("pipeline 2, vocab-2"), 2, way, "2", str(tmp_path)) as ranks:
        ranks.ready()
        said, seconds = ranks.ends(1)
        printed = "\n".join(ranks.says(1))
    assert seconds < 2 + LONGEST
    assert WAITED.search(said[0]), said
    assert re.search(rf"; rank 1 is {where} \(by_hand.py:\d+\)", said[0]), said
    assert "rank 1: the run has failed: rank 0 waited too long" in printed  # by its watch
    recorded = [(tmp_path / f"rank_{rank}.txt").read_text() for rank in (0, 1)]
    assert all("waited too long (2 s)" in text for text in recorded)
    assert "    time.sleep(PATIENCE)" in recorded[1]  # its stack
    assert re.search(r"  0\.\d+ +FORWARD stage 0 mb 3\n", recorded[0])
    assert re.search(r"    [2-9]\.\d+ +\w.*$", recorded[0].strip().splitlines()[-1]), recorded[0]


@pytest.mark.sweep
def test_a_script_that_fails_with_an_open_worker_is_named(
    folder_of: Callable[[str], Path],
) -> None:
    with started(folder_of("pipeline 2"), 2, "an error in the script of rank 1") as ranks:
        ranks.ready()
        said, _ = ranks.ends(1)
    assert (
        "rank 1 left after call 2 (step) (its process ended, its last error was OSError" in said[0]
    )
