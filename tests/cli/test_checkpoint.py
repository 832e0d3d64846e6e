"""`parcompiler checkpoint`: what a saved run holds, whether it is whole, and its weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parcompiler.cli import run
from tests.runtime.workers import batch, compiled, mixed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was saved after one step."""
    folder = tmp_path_factory.mktemp("run")
    with compiled(mixed(), 2).worker() as worker:
        worker.set_optimizer(torch.optim.AdamW, lr=1e-3)
        worker.train_step(batch(2))
        worker.save(folder)
    return folder


def test_a_checkpoint_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "show", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "step              1\n" in shown
    assert "mesh              pipeline=1, data=1, tensor=1\n" in shown
    assert run(["checkpoint", "show", str(folder), "--tensors", "--format", "json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["optimizer"] == "AdamW"
    names = {item["name"] for item in facts["tensors"]}
    assert {"model/first.weight", "optimizer exp_avg/first.weight"} <= names


def test_its_weights_are_exported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--output", str(tmp_path / "out"), "--dtype", "float64"]
    assert run(["checkpoint", "export", str(folder), *arguments]) == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights["first.weight"].dtype == torch.float64
    assert "twin.weight" not in weights  # it is tied to first.weight
    assert "weights of step 1 in model.safetensors" in capsys.readouterr().out


def test_its_files_are_checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "check", str(folder)]) == 0
    path = next(folder.glob("*/rank_0.safetensors"))
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + b"!")
    assert run(["checkpoint", "check", str(folder)]) == 1
    assert "rank_0.safetensors is damaged" in capsys.readouterr().out
    path.unlink()
    assert run(["checkpoint", "check", str(folder), "--format", "json"]) == 1
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert "cannot read" in faults[0]
    path.write_bytes(raw)


def test_a_folder_without_a_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoint", "show", str(tmp_path)]) == 2
    assert "no checkpoint in" in capsys.readouterr().err
