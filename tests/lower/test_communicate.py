"""Messages around any order of compute: no rank waits in a circle, even if sends blocked."""

import itertools
from collections.abc import Sequence

import pytest
import torch

from parcompiler.instruction import Instruction, Kind
from parcompiler.lower.communicate import training
from parcompiler.lower.lowered import StageProgram, StageValue
from parcompiler.schedules import build


def stages_and_values(
    ranks: list[int], skips: list[tuple[int, int]]
) -> tuple[list[StageProgram], dict[str, StageValue]]:
    """Stages in a chain, and values that skip from one stage to another."""
    flows = [*itertools.pairwise(range(len(ranks))), *skips]
    values = {
        f"v{a}_{b}": StageValue(f"v{a}_{b}", (1,), torch.float32, True, a, (b,)) for a, b in flows
    }
    stages = [
        StageProgram(
            index=j,
            rank=rank,
            calls=(),
            prologue=(),
            inputs=(),
            receives=tuple(f"v{a}_{b}" for a, b in flows if b == j),
            gives=tuple(f"v{a}_{b}" for a, b in flows if a == j),
            loss="loss" if j == len(ranks) - 1 else None,
            tensors=(),
        )
        for j, rank in enumerate(ranks)
    ]
    return stages, values


def ends(lists: Sequence[Sequence[Instruction]]) -> bool:
    """Whether every rank comes to its end when a send waits until its receive is posted."""
    lines = [list(item) for item in lists]
    posted: set[tuple[object, ...]] = set()
    position = [0] * len(lines)
    moved = True
    while moved:
        moved = False
        for rank, items in enumerate(lines):
            while position[rank] < len(items):
                item = items[position[rank]]
                key = (item.value, item.gradient, item.microbatch)
                if item.kind is Kind.RECV:
                    posted.add((item.peer, rank, *key))
                if item.kind is Kind.SEND and (rank, item.peer, *key) not in posted:
                    break
                position[rank] += 1
                moved = True
    return all(p == len(items) for p, items in zip(position, lines, strict=True))


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(5, 8), (6, 4), (9, 16), (12, 24)])
def test_values_that_skip_many_ranks_never_make_a_circle(
    ranks: int, microbatches: int, schedule: str
) -> None:
    skips = [(0, ranks - 1), (0, 3), (1, ranks - 2)]
    stages, values = stages_and_values(list(range(ranks)), skips)
    lists = training(build(schedule, ranks, microbatches).orders, stages, values, ())
    assert ends(lists)
    for source, target in itertools.permutations(range(ranks), 2):
        sends = [i for i in lists[source] if i.kind is Kind.SEND and i.peer == target]
        receives = [i for i in lists[target] if i.kind is Kind.RECV and i.peer == source]
        assert [(i.value, i.microbatch) for i in sends] == [
            (i.value, i.microbatch) for i in receives
        ]


def test_a_receive_is_posted_before_the_compute_that_runs_while_it_arrives() -> None:
    stages, values = stages_and_values([0, 1], [])
    _, last = training(build("1f1b", 2, 4).orders, stages, values, ())
    assert [str(item) for item in last[:4]] == [
        "RECV v0_1 mb 0 from 0",
        "RECV v0_1 mb 1 from 0",
        "FORWARD stage 1 mb 0",
        "BACKWARD stage 1 mb 0",
    ]
