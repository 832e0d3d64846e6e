"""examples/plan_gpt3.py and plan_llama405b.py, with fewer layers and devices than they are for."""

import runpy
import sys
from pathlib import Path

import pytest

import parcompiler as pc
from parcompiler.plan import Shape

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    """What an example prints."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_gpt3_is_planned_on_the_best_mesh_of_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    small = ("--preset", "tiny", "--nodes", "1", "--devices-per-node", "4", "--batch", "16")
    out = run("plan_gpt3.py", monkeypatch, capsys, *small, "--plan", str(plan))
    assert out.startswith("GPT on 4 x h100\n")
    assert "Meshes considered" in out
    found = pc.Plan.from_json(plan.read_text())
    assert found.meshes is not None
    assert found.microbatches * found.mesh.data == 16
    assert found.precision == "bf16"


def test_llama_is_planned_on_the_given_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    small = ("--layers", "2", "--pipeline", "2", "--tensor", "2", "--data", "4", "--sequence", "64")
    few = ("--microbatches", "2", "--plan", str(plan))
    out = run("plan_llama405b.py", monkeypatch, capsys, *small, *few)
    assert out.startswith("LlamaForCausalLM on 16 x h100\n")
    assert "Meshes considered" not in out
    assert pc.Plan.from_json(plan.read_text()).mesh == Shape(2, 2, 4, "h100")


@pytest.mark.sweep
def test_llama_may_be_searched_for_its_mesh(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--layers", "2", "--pipeline", "2", "--tensor", "2", "--data", "4", "--sequence", "64")
    out = run("plan_llama405b.py", monkeypatch, capsys, *small, "--search")
    assert "Meshes considered" in out
