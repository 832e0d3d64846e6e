"""benchmarks/gpu: every line has a twin on the CPU, at tiny sizes."""

from pathlib import Path

import pytest
import torch

from benchmarks.gpu import rank
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.lines import EXACT, LINES

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


@pytest.mark.parametrize("name", rank.programs(1))
def test_programs_of_one_rank_are_exact(name: str) -> None:
    assert max(rank.errors("cpu", **rank.programs(1)[name])) <= EXACT


def test_two_stages_are_on_one_rank() -> None:
    stages = rank.compiled("cpu", **rank.programs(1)["two stages on one rank"]).plan.stages
    assert stages is not None
    assert [stage.rank for stage in stages] == [0, 0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "no CUDA device" in capsys.readouterr().out
