"""The configurations of examples/: published sizes, and plans of them for a thousand GPUs."""

import json
import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from parcompiler.cli import run
from parcompiler.cli.huggingface import build

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "configurations"
# Parameters as the makers of each model publish them, in billions.
PUBLISHED = {
    "bert-large": 0.335, "bloom-176b": 176.2, "falcon-40b": 41.3, "gemma-2-27b": 27.2,
    "gpt-neox-20b": 20.6, "gpt2-xl": 1.56, "llama-3.1-70b": 70.6, "llama-3.1-8b": 8.03,
    "mistral-7b": 7.24, "mixtral-8x7b": 46.7, "opt-66b": 65.7, "phi-3-medium": 14.0,
    "qwen3-32b": 32.8, "t5-11b": 11.3,
}  # fmt: skip
SECONDS = 60  # of one core, for the plan of Llama 70B


def test_there_is_a_configuration_for_each_published_size() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(PUBLISHED)


def newcomer() -> list[str]:
    """The two commands of the README that go from a clone to a report of Llama's plan."""
    text = (ROOT / "README.md").read_text()
    (found,) = re.findall(r"```sh\n(make install\n.+?)```", text, re.DOTALL)
    commands = found.strip().splitlines()
    assert len(commands) == 2
    return [command.partition("#")[0].strip() for command in commands]


def test_two_commands_go_from_a_clone_to_a_page_about_llama(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install, plan = newcomer()
    assert re.search(r"^install: \$\(INSTALLED\)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert install == "make install"
    name, *arguments = shlex.split(plan)
    assert name == ".venv/bin/parcompiler"
    small = tmp_path / arguments[1].removeprefix("hf:")
    small.parent.mkdir(parents=True)
    small.write_text(
        json.dumps(shrunk(json.loads((ROOT / small.relative_to(tmp_path)).read_text())))
    )
    monkeypatch.chdir(tmp_path)
    quick = [
        "--schedule",
        "1f1b",
        "--vocabulary",
        "whole",
        "--sequence",
        "8",
        "--microbatches",
        "4",
    ]
    assert run([*arguments, *quick]) == 0
    assert capsys.readouterr().out.startswith("LlamaForCausalLM on ")
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """A Llama of the same kind that is planned in a second."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    assert {*sizes, *heads} <= set(config)
    return {**config, **sizes, **heads}


@pytest.mark.sweep
def test_the_two_commands_work_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, *arguments = shlex.split(newcomer()[1])
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 0
    assert (tmp_path / "report.html").is_file()


@pytest.mark.sweep
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_configuration_has_the_published_size(name: str) -> None:
    model, _ = build(FOLDER / f"{name}.json", None, None)
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.sweep
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_page_about_a_plan_for_1024_gpus_is_made_that_of_70b_in_a_minute(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    mesh = ["--mesh", "pipeline=16,tensor=8,data=8", "--device", "h100"]
    begin = time.process_time()
    assert run(["plan", f"hf:{FOLDER / name}.json", *mesh, "--html", str(page)]) == 0
    seconds = time.process_time() - begin
    out, err = capsys.readouterr()
    assert " on 1024 x h100\n" in out
    assert err.startswith("report: ")
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert seconds < SECONDS or name != "llama-3.1-70b"
