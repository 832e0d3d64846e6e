"""What bounds a step, and what to try next: sums, known cases, and that advice holds."""

import dataclasses
import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import parcompiler as pc
from parcompiler.models import gpt
from parcompiler.report import Report
from parcompiler.report.overview import bounded, following
from parcompiler.report.units import BYTES, quantity
from tests.report.programs import DEVICE, Made, small_gpt, small_t5


def parts(report: Report) -> dict[str, float]:
    return {part.name: part.seconds / report.step.seconds for part in report.step.parts}


@pytest.mark.parametrize("make", [small_gpt, small_t5])
def test_parts_add_up_to_the_step(make: Callable[[], Made]) -> None:
    made = make()
    assert math.isclose(sum(parts(made.report).values()), 1, rel_tol=1e-6)  # figures are rounded
    waiting = {"waiting for other stages", "messages between stages"}
    idle = sum(share for name, share in parts(made.report).items() if name in waiting)
    assert idle == pytest.approx(min(made.timeline.bubble), abs=1e-6)


class Layers(nn.Module):
    """Matrix products of `width`, all alike."""

    def __init__(self, width: int, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def report(rows: int, mesh: pc.Mesh, **options: Any) -> pc.Report:
    with torch.device("meta"):
        model, x = Layers(256), torch.empty(rows, 256)
    return pc.compile(model, mesh, (x,), vocabulary="whole", **options).report()


# A device on which one thing alone is slow.
FAST = dataclasses.replace(DEVICE, flops=(("float32", 1e15),), launch_overhead=0.0)
CASES = {
    "arithmetic": dataclasses.replace(DEVICE, memory_bandwidth=1e14, launch_overhead=0.0),
    "memory traffic": FAST,
    "kernel launches": dataclasses.replace(FAST, memory_bandwidth=1e14, launch_overhead=1e-3),
}


@pytest.mark.parametrize("slow", CASES)
def test_what_alone_is_slow_bounds_the_step(slow: str) -> None:
    made = report(64, pc.Mesh(device=CASES[slow]), microbatches=1, optimizer="none")
    assert parts(made)[slow] > 0.9
    assert f" goes into {slow}. " in page_text(made)
    assert next(iter(parts(made))) == slow


def page_text(made: pc.Report) -> str:
    return f"{bounded(made)} {following(made)}"


def test_ranks_and_stages_that_wait_are_named() -> None:
    link = pc.Device.from_json(DEVICE.to_json()).link
    slow = dataclasses.replace(FAST, memory_bandwidth=1e14,
                               link=dataclasses.replace(link, bandwidth=1e7))  # fmt: skip
    options: dict[str, Any] = {"microbatches": 1, "schedule": "naive", "recompute": "none"}
    assert next(iter(parts(report(64, pc.Mesh(data=2, device=slow), zero=0)))) == "data ranks"
    pair = pc.Mesh(pipeline=2, device=slow)
    assert next(iter(parts(report(64, pair, **options)))) == "messages between stages"
    quick = dataclasses.replace(slow, link=dataclasses.replace(link, bandwidth=1e15, latency=0.0),
                                flops=(("float32", 1e9),))  # fmt: skip
    shares = parts(report(64, pc.Mesh(pipeline=2, device=quick), **options))
    assert shares["waiting for other stages"] == pytest.approx(0.5, abs=0.05)


def test_what_to_try_next_is_as_fast_as_it_says() -> None:
    forced: dict[str, Any] = {
        "schedule": "gpipe",
        "recompute": "full",
        "microbatches": 4,
        "stages": "even",
    }
    mesh = pc.Mesh(pipeline=4, device=dataclasses.replace(DEVICE, memory=2**30))
    made = report(64, mesh, **forced)
    changes = {change.option: change for change in made.step.changes}
    assert {"recompute", "microbatches"} <= changes.keys()
    rate = forced["microbatches"] / made.step.seconds
    for option, change in changes.items() - {("mesh", changes.get("mesh"))}:
        value: Any = int(change.value) if change.value.isdigit() else change.value
        tried = forced | {option: value}
        per_second = tried["microbatches"] / report(64, mesh, **tried).step.seconds
        assert per_second == pytest.approx(rate * (1 + change.gain), rel=0.01)
    assert "--recompute none (+" in page_text(made)


def test_another_mesh_is_as_fast_as_it_says() -> None:
    link = pc.Device.from_json(DEVICE.to_json()).link
    slow = dataclasses.replace(FAST, link=dataclasses.replace(link, bandwidth=1e9))
    mesh = pc.Mesh(tensor=2, data=2, device=slow)
    made = report(64, mesh, microbatches=2)
    (change,) = (change for change in made.step.changes if change.option == "mesh")
    assert change.value == "tensor=4 --microbatches 4"  # the same batch
    tried = report(64, pc.Mesh(tensor=4, device=slow), microbatches=4)
    assert tried.step.seconds == pytest.approx(change.seconds, rel=1e-6)
    assert made.step.seconds / tried.step.seconds - 1 == pytest.approx(change.gain, rel=1e-6)
    assert f"--mesh {change.value} (+" in page_text(made)
    assert "--mesh auto weighs other meshes" in page_text(report(64, mesh, stages=[4]))


def test_the_optimizer_bounds_a_step_of_one_row_and_zero_shares_it_out() -> None:
    device = CASES["memory traffic"]
    made = report(1, pc.Mesh(device=device), microbatches=1)
    assert next(iter(parts(made))) == "optimizer"
    seconds = []
    for level in (0, 1):
        mesh = pc.Mesh(data=2, device=device)
        events = report(1, mesh, microbatches=1, zero=level).trail.events
        (update,) = (event for event in events if event.text == "UPDATE ranks 0")
        seconds.append(update.end - update.begin)
    assert seconds[0] == pytest.approx(2 * seconds[1])


def test_a_plan_that_nothing_improves_says_so() -> None:
    made = report(64, pc.Mesh(device=CASES["arithmetic"]), microbatches=4)
    assert made.step.changes == ()
    assert "No other number of micro-batches" in page_text(made)


def test_16_bits_are_proposed_where_the_device_is_faster_in_them() -> None:
    device = dataclasses.replace(DEVICE, flops=(("float32", 1e12), ("bfloat16", 4e12)))
    made = report(64, pc.Mesh(device=device), microbatches=4, optimizer="none")
    (change,) = made.step.changes
    assert (change.option, change.value) == ("precision", "bf16")
    assert change.gain > 0.5


def test_16_bits_have_the_update_of_masters_in_float32() -> None:
    device = dataclasses.replace(DEVICE, flops=(("float32", 1e12), ("bfloat16", 4e12)))
    plain, with_masters = (
        report(64, pc.Mesh(device=device), microbatches=1, optimizer="adamw", precision=precision)
        for precision in (None, "bf16")
    )
    (change,) = (one for one in plain.step.changes if one.option == "precision")
    assert change.seconds == pytest.approx(with_masters.step.seconds, rel=0.01)


def test_lines_of_the_source_have_the_compute_of_their_blocks() -> None:
    made = small_gpt()
    priced = made.problem.priced(1)
    lines = made.report.lines
    assert sum(line.share for line in lines) == pytest.approx(1, abs=1e-6)
    layer = [line for line in lines if line.template == "Layer"]
    b = next(b for b, block in enumerate(priced.cut.blocks) if block.template == "Layer")
    for name in ("forward", "backward"):
        whole = getattr(priced, name)[b]
        assert sum(getattr(line, name) for line in layer) == pytest.approx(whole, rel=1e-6)
    source = inspect.getsource(sys.modules[gpt.GPT.__module__]).splitlines()
    for line in layer:
        file, _, number = line.place.partition(":")
        assert file == "model.py" and source[int(number) - 1].strip() == line.text
    assert "self.down" in layer[0].text and layer[0].backward > layer[0].forward


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "sgd"])
def test_the_first_screen_says_what_masters_would_take(optimizer: str) -> None:
    model, x = Layers(64).to(torch.bfloat16), torch.zeros(2, 64, dtype=torch.bfloat16)
    both = [
        pc.compile(
            model, pc.Mesh(pipeline=2), (x,), loss=torch.sum, microbatches=2, precision=precision,
            optimizer=optimizer, stages="even", progress=False,
        ).report()
        for precision in (None, "bf16")
    ]  # fmt: skip
    own, with_masters = (max(rank.states for rank in report.ranks) for report in both)
    more = quantity(with_masters - own, BYTES)
    said = f"bf16 would keep float32 masters and states (+{more} a rank)"
    assert said in " ".join(str(both[0]).split())
    assert "would keep" not in str(both[1])
