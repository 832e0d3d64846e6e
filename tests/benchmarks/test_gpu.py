"""benchmarks/gpu: every line has a twin on the CPU, at tiny sizes."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.lines import LINES
from benchmarks.gpu.programs import program, programs

APART = "proofs"  # in processes of their own


def test_all_lines_run_on_the_cpu(tmp_path: Path) -> None:
    table, figures = tmp_path / "table.md", tmp_path / "device.json"
    lines = [line for line in LINES if line != APART]
    given = ["--device", "cpu", "--output", str(table), "--calibration", str(figures)]
    assert main([*given, "--only", *lines]) == 0
    text = table.read_text()
    assert "tiny sizes" in text
    assert all(f"\n| {line} | " in text for line in lines)
    assert "flash_attention" in text
    assert figures.exists()


@pytest.mark.parametrize("name", ["two stages on one rank", "recompute offload", "moe"])
def test_programs_of_one_rank_are_exact(name: str) -> None:
    given = {name: (model, options) for name, model, options, _ in programs(1, False)}
    found = program(*given[name], "h100")
    assert found.verify(progress=False).decisive.largest <= 1e-9
    if name == "two stages on one rank":
        assert [stage.rank for stage in found.plan.stages or ()] == [0, 0]


def test_programs_of_several_ranks_are_planned() -> None:
    wanted = [given for given in programs(4, True) if given not in programs(1, True)]
    for _, _, options, _ in wanted:
        degrees = [options.get(axis, 1) for axis in ("pipeline", "data", "tensor", "context")]
        assert math.prod(degrees) == 4
    assert len({name for name, *_ in wanted}) == len(wanted) > 30


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "no CUDA device" in capsys.readouterr().out
