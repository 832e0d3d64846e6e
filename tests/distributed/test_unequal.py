"""A pipeline of unequal devices computes what one process does; see test_parity."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import parcompiler as pc
from parcompiler.device import device
from tests import zoo


@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        ({}, {"schedule": "zb-h1", "vocabulary": "whole"}),
        ({}, {"schedule": "interleaved", "vocabulary": "vocab-2"}),
        ({"tensor": 2}, {"schedule": "1f1b", "vocabulary": "whole"}),
    ],
)
def test_unequal_devices_equal_one_process(
    degrees: dict[str, int], options: dict[str, Any], tmp_path: Path
) -> None:
    """Both devices come from files, as two machines measured them."""
    files = []
    for factor in (1, 3):
        cpu = device("cpu")
        flops = tuple((dtype, peak / factor) for dtype, peak in cpu.flops)
        files.append(tmp_path / f"{factor}.json")
        own = dataclasses.replace(
            cpu,
            name=f"cpu-{factor}",
            flops=flops,
            memory_bandwidth=cpu.memory_bandwidth / factor,
            launch_overhead=cpu.launch_overhead * factor,
        )
        files[-1].write_text(own.to_json())
    model, inputs = zoo.own_gpt(layers=6, dropout=0.1)
    mesh = pc.Mesh(pipeline=2, device=files, **degrees)
    program = pc.compile(
        model, mesh, inputs, microbatches=3, precision="fp64", progress=False, **options
    )
    sizes = [0, 0]
    for choice in program.plan.stages or ():
        sizes[choice.rank] += len(choice.blocks)
    assert sizes[0] > sizes[1]
    found = program.verify()
    assert found.ok, str(found)
    assert max(found.loss_error, found.gradient_error, found.parameter_error) <= 1e-9
