"""No plan that can be compiled by hand beats the answer of a search by more than its margin."""

import contextlib
import dataclasses
import itertools
import math

import pytest
import torch

import parcompiler as pc
from parcompiler.models import gpt
from parcompiler.passes.base import MARGIN
from parcompiler.passes.schedule import CANDIDATES
from tests.meshes.test_search import LARGE, captured, fits

DEVICES = [(1, 4), (2, 2), (1, 8), (2, 4), (4, 2)]
MEMORY = [80 * 10**9, 400 * 2**20, 220 * 2**20]
LAYERS = [4, 7, 12, 18]


def problem(seed: int) -> tuple[gpt.Config, pc.Cluster, int, tuple[int, ...]]:
    """A GPT, a cluster, the rows of a step, and the rows of a micro-batch that are weighed."""
    nodes, each = DEVICES[seed % len(DEVICES)]
    config = dataclasses.replace(
        LARGE, layers=LAYERS[seed % len(LAYERS)], vocabulary=(2048, 32768)[seed // 2 % 2],
        tied=seed % 2 == 0,
    )  # fmt: skip
    cluster = pc.Cluster(nodes, each, fits(MEMORY[seed % len(MEMORY)]))
    return config, cluster, (2, 4)[seed // 3 % 2] * cluster.size, (1, 2) if seed % 3 else (1,)


def fastest_by_hand(
    config: gpt.Config, cluster: pc.Cluster, total: int, sizes: tuple[int, ...]
) -> float:
    """The shortest step of every mesh, micro-batch and schedule that can be compiled, "auto" among
    them, which also weighs more stages on a rank; infinite where none can."""
    steps = []
    for mesh, rows in itertools.product(cluster.meshes(), sizes):
        each, rest = divmod(total, rows * mesh.data)
        for schedule in ("auto", *CANDIDATES) if not rest else ():
            if mesh.pipeline > 1 or schedule == "auto":
                with contextlib.suppress(pc.ParcompilerError):
                    plan = pc.compile(
                        captured(config, rows), mesh, microbatches=each, schedule=schedule
                    )
                    steps.append(plan.simulate().step_time)
    return min(steps, default=math.inf)


def check(seed: int) -> None:
    config, cluster, total, sizes = problem(seed)
    with torch.device("meta"):
        model = gpt.GPT(config)
    tokens = torch.zeros(1, config.sequence, dtype=torch.long)
    option = list(sizes[1:]) or "given"
    best = fastest_by_hand(config, cluster, total, sizes)
    if best == math.inf:
        with pytest.raises(pc.InfeasibleError, match="fits no mesh"):
            pc.compile(model, cluster, (tokens, tokens), microbatches=total, microbatch=option)
        return
    found = pc.compile(model, cluster, (tokens, tokens), microbatches=total, microbatch=option)
    step = found.simulate().step_time
    assert step <= (1 + MARGIN) * best * (1 + 1e-9), (step / best, found.plan.mesh)


@pytest.mark.parametrize("seed", [0])
def test_nothing_compiled_by_hand_beats_the_answer(seed: int) -> None:
    check(seed)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", [seed for seed in range(30) if seed != 0])
def test_nothing_compiled_by_hand_beats_the_answer_of_many(seed: int) -> None:
    check(seed)
