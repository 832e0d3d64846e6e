"""`parcompiler checkpoint`: what a saved run holds, whether it is whole, and its weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import parcompiler as pc
from parcompiler.cli import run
from parcompiler.cli.huggingface import build
from parcompiler.runtime.files import listing
from tests.cli.test_huggingface import SIZES, config
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


def test_what_cannot_be_exported_is_named_before_anything_is_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, text = tmp_path / "out", tmp_path / "text"
    text.write_text("no JSON")
    for option, message in (
        (["--config", "no.json"], "cannot read the configuration no.json (No such file or direc"),
        (["--config", str(text)], f"the configuration {text} is not JSON (Expecting value"),
        (["--output", str(text)], f"cannot write weights into {text}: it is not a folder"),
    ):
        assert run(["checkpoint", "export", str(folder), "--output", str(out), *option]) == 2
        assert message in capsys.readouterr().err
        assert not out.exists()


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


def test_a_configuration_is_in_the_checkpoint_and_needs_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published weights in by the command line, a step, and a plan for two ranks."""
    monkeypatch.chdir(tmp_path)
    path = config(tmp_path, "llama", "LlamaForCausalLM", **SIZES)
    module, _ = build(path, 8, 2)
    module.to_empty(device="cpu").save_pretrained(tmp_path / "published")  # type: ignore[operator]
    typed = [f"hf:{path}", "--sequence", "8", "--rows", "2", "--precision", "fp64"]
    typed += ["--pretrained", "published", "--microbatches", "3", "--mesh", "data=1"]
    assert run(["compile", *typed, "--export", "out", "--quiet"]) == 0
    with pc.load("out").worker() as worker:
        worker.set_optimizer(torch.optim.SGD, lr=0.1)
        tokens = torch.zeros(6, 8, dtype=torch.long)
        worker.train_step({"input_ids": tokens, "labels": tokens})
        worker.save("run")
    path.unlink()
    capsys.readouterr()
    assert run(["checkpoint", "show", "run"]) == 0
    shown = capsys.readouterr().out
    assert "options           precision=fp64\n" in shown
    assert "batch             3 micro-batches of 2 samples\n" in shown
    assert f"model             hf:{path}\n" in shown
    arguments = ["--checkpoint", "run", "--mesh", "tensor=2", "--format", "json", "--quiet"]
    assert run(["plan", *arguments]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["model"], plan["microbatches"], plan["precision"]) == (
        "LlamaForCausalLM", 3, "fp64",
    )  # fmt: skip
    assert run(["plan", "--checkpoint", "run", "--mesh", "auto", "--devices-per-node", "2"]) == 0
    assert "LlamaForCausalLM on 2 x cpu" in capsys.readouterr().out
    # A level of ZeRO is left out where there is only one data rank.
    (saved,) = Path("run").glob("step_*")
    facts = json.loads((saved / "checkpoint.json").read_text())
    facts["request"]["options"]["zero"] = 2
    (saved / "checkpoint.json").write_text(json.dumps(facts))
    (saved / "SHA256SUMS").write_text(listing(saved, {}))
    for mesh in (["data=1"], ["pipeline=2"], ["auto", "--devices-per-node", "1"]):
        assert run(["plan", "--checkpoint", "run", "--mesh", *mesh, "--quiet"]) == 0


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"samples": "two"}, "is damaged: its request has no samples"),
        ({"run": "rm"}, "does not say what its program was compiled from"),
        ({"options": {"precision": "fp1"}}, "precision must be one of"),
        ({"options": {"passes": "x"}}, "'passes' is no option of compile"),
    ],
)
def test_a_damaged_request_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: dict[str, Any],
    said: str,
) -> None:  # fmt: skip
    copy = shutil.copytree(next(folder.glob("step_*")), tmp_path / "step_00000001")
    facts = json.loads((copy / "checkpoint.json").read_text())
    facts["request"] |= damage
    (copy / "checkpoint.json").write_text(json.dumps(facts))
    (copy / "SHA256SUMS").write_text(listing(copy, {}))
    model = "tests.cli.models:make"
    assert run(["plan", model, "--checkpoint", str(tmp_path), "--mesh", "data=1"]) == 2
    assert said in capsys.readouterr().err
