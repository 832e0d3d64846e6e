"""No plan is slower than one that a user can name (even stages, runs of blocks, named schedules),
but for the margin within which "auto" takes the plainest."""

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import parcompiler as pc
from parcompiler.device import device
from parcompiler.models import gpt, t5
from parcompiler.passes.base import MARGIN
from parcompiler.passes.schedule import CANDIDATES
from parcompiler.passes.shard.local import local
from parcompiler.prices import lowered_step

SLACK = 1 + 1e-9
SCHEDULES = ("1f1b", "interleaved", "zb-v")
Case = tuple[nn.Module, dict[str, torch.Tensor]]


class UNet(nn.Module):
    """Layers down and up again, with skips between those of equal width."""

    def __init__(self, depth: int = 5, width: int = 32) -> None:
        super().__init__()
        widths = [width * 2 ** min(k, 3) for k in range(depth)]
        self.down = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1) for a, b in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(
            nn.Conv2d(2 * b, a, 3, padding=1)
            for a, b in zip([4, *widths[:-1]][::-1], widths[::-1], strict=True)
        )

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in self.down:
            images = torch.relu(layer(images))
            skips.append(images)
        for layer in self.up:
            images = layer(torch.cat([images, skips.pop()], 1))
        return nn.functional.cross_entropy(images, labels)


def tokens(rows: int, length: int, *names: str) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(rows, length, dtype=torch.long) for name in names}


def built(name: str) -> Case:
    if name == "t5":
        return t5.T5(t5.PRESETS["small"]), tokens(1, 128, "tokens", "decoder_tokens", "labels")
    if name == "u-net":
        labels = torch.zeros(2, 64, 64, dtype=torch.long)
        return UNet(), {"images": torch.zeros(2, 3, 64, 64), "labels": labels}
    config = gpt.Config(
        layers=9, heads=4, hidden=128, vocabulary=int(name.removeprefix("gpt-")), sequence=64
    )
    return gpt.GPT(config), tokens(1, 64, "tokens", "labels")


@cache
def captured(name: str) -> pc.Program:
    with torch.device("meta"):
        model, inputs = built(name)
    return pc.compile(model, pc.Mesh(device=sized(2**50)), inputs, microbatches=1, progress=False)


def sized(memory: int) -> pc.Device:
    return dataclasses.replace(device("h100"), memory=memory)


def step(
    name: str, pipeline: int, memory: int, schedule: str, stages: str | tuple[int, ...] = "auto"
) -> tuple[float, int] | None:
    """Seconds and bytes of a step; None where nothing fits."""
    mesh = pc.Mesh(pipeline, device=sized(memory))
    try:
        program = pc.compile(
            captured(name), mesh, schedule=schedule, stages=stages, microbatches=2 * pipeline,
            vocabulary="whole", progress=False,
        )  # fmt: skip
    except (pc.InfeasibleError, pc.InputError):
        return None
    timeline = program.simulate()
    return timeline.step_time, max(timeline.peak_memory)


def runs(name: str, pipeline: int, schedule: str) -> Iterator[tuple[int, ...]]:
    """Counts of blocks on the stages: as equal as can be, the rest first or last."""
    blocks = len(captured(name).problem.priced(1).cut.blocks)
    stages = pipeline * (2 if schedule in ("interleaved", "zb-v") else 1)
    each, more = divmod(blocks, stages)
    if each:
        yield (each + 1,) * more + (each,) * (stages - more)
        yield (each,) * (stages - more) + (each + 1,) * more


def check(name: str, pipeline: int, schedules: tuple[str, ...], share: float) -> None:
    """Compare what is chosen with what can be named, in a share of the memory of a free step."""
    free = step(name, pipeline, 2**50, schedules[0])
    assert free is not None
    memory = int(share * free[1])
    named = []
    for schedule in schedules:
        chosen = step(name, pipeline, memory, schedule)
        others = [step(name, pipeline, memory, schedule, "even")]
        others += [
            step(name, pipeline, memory, schedule, run) for run in runs(name, pipeline, schedule)
        ]
        best = min((other[0] for other in others if other), default=None)
        assert best is None or (chosen is not None and chosen[0] <= best * SLACK), schedule
        named += [item[0] for item in (chosen, *others) if item]
    chosen = step(name, pipeline, memory, "auto")
    assert not named or (chosen is not None and chosen[0] <= min(named) * (1 + MARGIN) * SLACK)


@pytest.mark.parametrize(("name", "share"), [("t5", 1.0), ("u-net", 0.7), ("gpt-4096", 1.0)])
def test_no_plan_is_slower_than_one_that_can_be_named(name: str, share: float) -> None:
    check(name, 4, SCHEDULES, share)


@pytest.mark.parametrize("pipeline", [3, 4])
def test_activations_are_saved_where_memory_excludes_even_stages(pipeline: int) -> None:
    """Stages that fit without recomputation were taken, though uneven (up to 13 % slower)."""
    check("gpt-4096", pipeline, ("1f1b", "zb-h1"), 1.0)


def test_no_schedule_is_faster_where_data_ranks_gather_for_longer_than_stages_compute() -> None:
    """Bounds of even stages with their gathers excluded the fastest schedule, by 9 %."""
    with torch.device("meta"):
        model = gpt.GPT(gpt.Config(layers=16, heads=16, hidden=2048, vocabulary=1024, sequence=256))
    mesh, inputs = pc.Mesh(4, 1, 16, device="h100"), tokens(1, 256, "tokens", "labels")
    given: Any = {"microbatches": 16, "precision": "bf16", "zero": 3, "progress": False}
    chosen = pc.compile(model, mesh, inputs, **given)
    named = (pc.compile(chosen, mesh, schedule=name, **given) for name in ("1f1b", "interleaved"))
    best = min(program.simulate().step_time for program in named)
    assert chosen.simulate().step_time <= best * (1 + MARGIN) * SLACK
    many = pc.compile(chosen, mesh, schedule="zb-v", **{**given, "microbatches": 42})
    judged = lowered_step(local(many.problem, many.plan), many.plan)  # of a few of them
    assert judged == pytest.approx(many.simulate().step_time, rel=0.01)


def test_a_plainer_schedule_is_not_slower_once_data_ranks_exchange() -> None:
    """The schedule that was taken for its plainness was 5 % slower than the fastest: how much of
    the exchange it hides was estimated."""
    config = gpt.Config(layers=8, heads=32, hidden=2560, vocabulary=51200, sequence=2048, tied=True)
    with torch.device("meta"):
        model, inputs = gpt.GPT(config), tokens(1, 2048, "tokens", "labels")
    a100 = dataclasses.replace(device("a100-80g"), memory=5 * 2**30)
    mesh = pc.Mesh(4, 1, 4, device=a100)
    given: Any = {"microbatches": 16, "precision": "bf16", "zero": 1, "vocabulary": "whole"}
    given["progress"] = False
    chosen = pc.compile(model, mesh, inputs, **given)
    named = pc.compile(chosen, mesh, schedule="zb-v", **given).simulate().step_time
    assert chosen.simulate().step_time <= (1 + MARGIN) * named


def test_parts_of_layers_are_moved_where_whole_layers_are_a_little_faster_at_first() -> None:
    """A division into whole layers was moved alone, and ended 4 % slower."""
    config = gpt.Config(layers=7, heads=4, hidden=128, vocabulary=64, sequence=64)
    with torch.device("meta"):
        model, inputs = gpt.GPT(config), tokens(1, 64, "tokens", "labels")
    mesh = pc.Mesh(4, device=("h100", "a100-80g", "h100", "a100-80g"))
    given: Any = {"schedule": "interleaved", "microbatches": 4, "vocabulary": "whole"}
    chosen = pc.compile(model, mesh, inputs, progress=False, **given)
    named = pc.compile(chosen, mesh, stages=(4, 1, 2, 1, 3, 1, 3, 2), progress=False, **given)
    assert chosen.simulate().step_time <= named.simulate().step_time * SLACK


@pytest.mark.sweep
@pytest.mark.parametrize("share", [1.0, 0.85, 0.7, 0.55])
@pytest.mark.parametrize("pipeline", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["t5", "u-net", "gpt-64", "gpt-4096", "gpt-32768"])
def test_no_plan_of_many_is_slower_than_one_that_can_be_named(
    name: str, pipeline: int, share: float
) -> None:
    check(name, pipeline, CANDIDATES, share)
