"""Pipelines of unequal devices: what each rank takes, what fits on it, and what it costs."""

import dataclasses
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import parcompiler as pc
from parcompiler.device import Device, device
from parcompiler.models import gpt
from parcompiler.passes.base import MARGIN
from parcompiler.passes.estimate import estimate
from parcompiler.passes.even import even_step
from parcompiler.passes.schedule import CANDIDATES
from parcompiler.passes.shard.local import local
from parcompiler.plan import TemplateTime
from parcompiler.report.web.charts import memory
from tests import zoo

CPU = device("cpu")


def slower(factor: float, name: str, memory: int = CPU.memory) -> Device:
    """The CPU, but so many times as slow in all that it computes."""
    flops = tuple((dtype, peak / factor) for dtype, peak in CPU.flops)
    return dataclasses.replace(
        CPU,
        name=name,
        flops=flops,
        memory_bandwidth=CPU.memory_bandwidth / factor,
        launch_overhead=CPU.launch_overhead * factor,
        memory=memory,
    )


HALF = slower(2, "cpu-half")


@cache
def captured(layers: int = 8) -> pc.Program:
    model, inputs = zoo.own_gpt(layers=layers)
    return pc.compile(model, pc.Mesh(), inputs, microbatches=1, vocabulary="whole")


def program(*devices: Device, **options: Any) -> pc.Program:
    """The program of a small GPT on a pipeline of these devices."""
    given: dict[str, Any] = {"microbatches": 64, "schedule": "1f1b", "vocabulary": "whole"}
    given |= options
    layers, degrees = given.pop("layers", 8), given.pop("degrees", {})
    mesh = pc.Mesh(pipeline=len(devices), device=devices, **degrees)
    return pc.compile(captured(layers), mesh, progress=False, **given)


def layers(found: pc.Program, count: int = 8) -> list[float]:
    """How many of so many layers each stage has; halves are blocks of their own where that pays."""
    blocks = [
        sum(name.startswith("layers.") for name in choice.blocks)
        for choice in found.plan.stages or ()
    ]
    return [number * count / sum(blocks) for number in blocks]


def test_a_device_half_as_fast_takes_about_half_of_the_layers() -> None:
    # and the head is on the last
    assert layers(program(CPU, HALF, CPU, layers=15), 15) == [7, 2.5, 5.5]
    assert layers(program(HALF, CPU, CPU, layers=15), 15) == [3, 6, 6]


def test_the_stages_take_the_seconds_of_their_own_device() -> None:
    mixed = program(CPU, HALF, stages="even").report().stages
    fast = program(CPU, CPU, stages="even").report().stages
    slow = program(HALF, HALF, stages="even").report().stages
    assert mixed[0].forward == fast[0].forward
    assert mixed[1].backward == slow[1].backward == pytest.approx(2 * fast[1].backward)


def test_a_device_with_little_memory_takes_what_fits() -> None:
    free = program(CPU, CPU)
    peak = free.simulate().peak_memory[1]
    little = slower(1, "cpu-little", memory=round(0.7 * peak))
    tight = program(CPU, little, recompute="none")
    assert layers(free) == [4, 4]
    assert layers(tight)[1] < 4
    assert tight.simulate().peak_memory[1] <= little.memory
    assert tight.plan.solution is not None
    assert tight.plan.solution.status == "optimal"


def test_only_the_device_with_little_memory_recomputes() -> None:
    peaks = program(CPU, CPU, stages="even").simulate().peak_memory
    little = slower(1, "cpu-little", memory=round(0.9 * peaks[1]))
    found = program(CPU, little, stages="even")
    stages = found.plan.stages
    assert stages is not None
    assert found.plan.recompute
    assert set(found.plan.recompute) < set(stages[1].blocks)
    assert found.simulate().peak_memory[1] <= little.memory


def test_a_device_on_which_nothing_fits_is_named() -> None:
    tiny = slower(1, "cpu-tiny", memory=30_000)
    with pytest.raises(pc.InfeasibleError, match=r"30,000 bytes on stage 1; the least"):
        program(CPU, tiny)
    with pytest.raises(pc.InfeasibleError, match=r"rank 1 .* cpu-tiny has 30,000"):
        program(CPU, tiny, stages="even", recompute="none")


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "interleaved"},
        {"schedule": "zb-v"},
        {"schedule": "search", "passes": zoo.SHORT},
        {"vocabulary": "vocab-1"},
        {"vocabulary": "interlaced", "degrees": {"tensor": 2}},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_the_estimate_of_the_passes_is_what_the_simulator_says(options: dict[str, Any]) -> None:
    found = program(HALF, CPU, **{"microbatches": 8, **options})
    own = local(found.problem, found.plan)
    step = found.simulate().step_time
    assert estimate(own, found.plan).step_time == pytest.approx(step, rel=1e-12)
    assert found.report().step.ideal <= step


def test_no_schedule_is_faster_where_slow_ranks_fill_a_short_pipeline() -> None:
    """Bounds of even stages counted as much for filling it as if all ranks had as many blocks."""
    fast = device("h100")
    slow = dataclasses.replace(
        fast, name="slow", flops=tuple((dtype, peak / 4) for dtype, peak in fast.flops),
        memory_bandwidth=fast.memory_bandwidth / 4, launch_overhead=4 * fast.launch_overhead,
    )  # fmt: skip
    with torch.device("meta"):
        model = gpt.GPT(gpt.Config(layers=16, heads=4, hidden=128, vocabulary=256, sequence=64))
    tokens, mesh = torch.zeros(1, 64, dtype=torch.long), pc.Mesh(3, device=(fast, slow, slow))
    given: Any = {"microbatches": 2, "vocabulary": "whole", "progress": False}
    chosen = pc.compile(model, mesh, (tokens, tokens), **given)
    best = math.inf
    for name in CANDIDATES:
        named = pc.compile(chosen, mesh, schedule=name, **given)
        step = named.simulate().step_time
        best, own = min(best, step), local(named.problem, named.plan)
        assert even_step(own, named.plan) <= step * (1 + 1e-9)
    assert chosen.simulate().step_time <= best * (1 + MARGIN) * (1 + 1e-9)


def test_equal_devices_in_a_sequence_are_one_device() -> None:
    one = pc.compile(captured(), pc.Mesh(pipeline=2), microbatches=8, schedule="1f1b")
    several = program(CPU, CPU, microbatches=8, vocabulary="auto")
    assert several.plan.to_json() == one.plan.to_json()
    assert several.report().to_json() == one.report().to_json()


def test_other_sizes_are_priced_on_each_device() -> None:
    found = program(CPU, HALF)
    costs = found.costs
    assert costs.at().step_time == pytest.approx(found.simulate().step_time)
    assert costs.at(batch=16).step_time > costs.at().step_time


def test_one_machine_cannot_measure_several_devices() -> None:
    with pytest.raises(pc.InputError, match=r"the mesh has several \(cpu, cpu-half\)"):
        program(CPU, HALF, costs="measured")


def test_a_plan_is_for_the_devices_that_it_was_made_for() -> None:
    found = program(CPU, HALF)
    plan = pc.Plan.from_json(found.plan.to_json())
    assert plan == found.plan
    assert plan.mesh.devices == ("cpu", "cpu-half")
    again = program(CPU, HALF, plan=plan)
    assert again.instructions(1) == found.instructions(1)
    timed = dataclasses.replace(plan, costs=(TemplateTime("Block", 1.0, 1.0, 1.0),))
    with pytest.raises(pc.PlanError, match="measured on one device, and its mesh has several"):
        program(CPU, HALF, plan=timed)
    with pytest.raises(pc.PlanError, match=r"another mesh .*'cpu', 'cpu-half'.*'cpu-half', 'cpu'"):
        program(HALF, CPU, plan=plan)


def test_the_report_says_which_device_each_stage_is_on() -> None:
    found = program(CPU, HALF, degrees={"data": 2})
    report = found.report()
    text = report.to_text()
    assert text.startswith("GPT on 2 x cpu, 2 x cpu-half\n")
    assert "its device" in text
    rows = [line.split() for line in text.splitlines() if "embedding" in line or "head" in line]
    assert ["0", "0", "cpu"] in [row[:3] for row in rows]
    assert ["1", "1", "cpu-half"] in [row[:3] for row in rows]
    assert pc.Report.from_json(report.to_json()) == report


def test_the_page_measures_each_rank_by_its_own_memory(tmp_path: Path) -> None:
    peaks = program(CPU, HALF, stages="even").simulate().peak_memory
    one, two = (slower(1, f"cpu-{r}", memory=round(1.2 * size)) for r, size in enumerate(peaks))
    report = program(one, two, stages="even", recompute="none").report()
    assert [report.mesh.limit(rank) for rank in range(2)] == [one.memory, two.memory]
    assert len(memory(report).layout["shapes"]) == 2
    report.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "of cpu-0</small>" in page
    assert "1 × cpu-0, 1 × cpu-1: pipeline 2" in page


def test_a_rank_knows_its_own_device(tmp_path: Path) -> None:
    found = program(CPU, HALF)
    assert [found.rank_program(rank).device for rank in range(2)] == ["cpu", "cpu-half"]
    folder = found.export(tmp_path / "out", weights=False)
    assert "device='cpu-half'" in (folder / "rank_1.py").read_text().replace('"', "'")
    assert "cpu-half" not in (folder / "rank_0.py").read_text()
    assert pc.load(folder).plan == found.plan
    with pytest.raises(pc.InputError, match=r"a job of equal nodes, .* \(cpu, cpu-half\)"):
        found.export(tmp_path / "job", launcher="slurm")
    assert not (tmp_path / "job").exists()
