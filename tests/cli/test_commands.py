"""The commands as a user meets them: what is printed where, the files, the exit codes."""

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import click
import pytest

import parcompiler as pc
from parcompiler import data_updates
from parcompiler.cli import run
from parcompiler.cli.app import parcompiler as COMMANDS
from parcompiler.cli.words import (
    COMPRESSIONS,
    COSTS,
    OPTIMIZERS,
    OUTER,
    PRECISIONS,
    SCHEDULES,
    UPDATES,
    VOCABULARY,
    devices,
)
from parcompiler.cost import OPTIMIZERS as KNOWN_OPTIMIZERS
from parcompiler.device import device, names
from parcompiler.options import METHODS
from parcompiler.options import PRECISIONS as KNOWN_PRECISIONS
from parcompiler.schedules import SCHEDULES as KNOWN_SCHEDULES

ROOT = Path(__file__).parents[2]
MODEL = "tests.cli.models:make"
FILE = str(Path(__file__).with_name("models.py"))
QUICK = ("--microbatches", "2", "--schedule", "1f1b", "--vocabulary", "whole")
PLAN = (MODEL, "--mesh", "pipeline=2", *QUICK)


def test_a_plan_is_printed_and_nothing_else_is_on_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["plan", *PLAN]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("GPT on 2 x cpu\n")
    assert "printed by the factory" not in out
    assert err == "printed by the factory\n"


@pytest.mark.parametrize("command", COMMANDS.commands.values(), ids=lambda command: command.name)
def test_every_option_of_a_command_is_a_parameter_of_its_own(command: click.Command) -> None:
    counts = Counter(parameter.name for parameter in command.params)
    assert [name for name, count in counts.items() if count > 1] == []


def test_weights_are_averaged_as_often_as_the_command_line_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, object]] = []

    def compiled(*_arguments: object, **options: object) -> None:
        asked.append(options)
        message = "nothing is compiled here"
        raise pc.InputError(message)

    monkeypatch.setattr("parcompiler.compiler.compile", compiled)
    line = [MODEL, "--mesh", "data=2", "--updates", "local", "--average-every", "5", "--quiet"]
    assert run(["plan", *line]) == 2
    assert run(["train", *line, "--data", FILE, "--save", str(tmp_path), "--every", "7"]) == 2
    assert [options["every"] for options in asked] == [5, 5]


def test_evaluation_mode_is_told_beside_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    model = MODEL.replace(":make", ":evaluating")
    assert run(["plan", model, *PLAN[1:], "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert err.count("parcompiler: the model is in evaluation mode") == 1
    assert "evaluation (dropouts that do not act: 0" in out


def test_a_factory_may_give_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    model = MODEL.replace(":make", ":lossless")
    assert run(["plan", model, *PLAN[1:], "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("Sequential on 2 x cpu\n")


def test_json_for_scripts_has_plan_and_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *PLAN, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    plan = pc.Plan.from_json(json.dumps(document["plan"]))
    report = pc.Report.from_json(json.dumps(document["report"]))
    assert (plan.schedule, plan.microbatches, report.plan.schedule) == ("1f1b", 2, "1f1b")


def test_files_are_written_and_named_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, trace, plan = tmp_path / "r.html", tmp_path / "t.json", tmp_path / "p.json"
    files = ["--html", str(page), "--trace", str(trace), "--json", str(plan)]
    assert run(["plan", *PLAN, *files]) == 0
    err = capsys.readouterr().err
    assert f"report: {page}\ntrace: {trace}\nplan: {plan}\n" in err
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert json.loads(trace.read_text())["traceEvents"]
    assert pc.Plan.from_json(plan.read_text()).schedule == "1f1b"
    assert run(["plan", *PLAN, *files, "--quiet", "--forms"]) == 0
    out, err = capsys.readouterr()
    assert "report:" not in err
    assert "Closed forms" in out


def test_an_open_mesh_is_chosen_from_those_of_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ["--mesh", "auto", "--nodes", "2", "--devices-per-node", "2", "--device", "h100"]
    assert run(["plan", MODEL, *cluster, *QUICK, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    plan = pc.Plan.from_json(json.dumps(document["plan"]))
    assert plan.mesh.pipeline * plan.mesh.tensor * plan.mesh.data == 4
    assert plan.microbatches * plan.mesh.data == 2
    assert plan.meshes is not None
    weighed = {(m.pipeline, m.tensor, m.data) for m in plan.meshes if m.context == 1}
    assert weighed == {(1, 1, 4), (2, 1, 2), (4, 1, 1), (1, 2, 2), (2, 2, 1)}


def test_the_micro_batch_may_be_open_too(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ["--mesh", "auto", "--devices-per-node", "1", "--device", "h100"]
    assert run(["plan", MODEL, *cluster, *QUICK, "--microbatch", "1,2", "--format", "json"]) == 0
    plan = pc.Plan.from_json(json.dumps(json.loads(capsys.readouterr().out)["plan"]))
    assert {item.rows for item in plan.meshes or ()} >= {1, 2}
    assert run(["plan", MODEL, "--mesh", "pipeline=2", "--microbatch", "auto"]) != 0
    assert "--microbatch is for --mesh auto" in capsys.readouterr().err


def test_each_pipeline_coordinate_may_have_its_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, plan = tmp_path / "mine.json", tmp_path / "plan.json"
    mine.write_text(dataclasses.replace(device("h200"), name="mine").to_json())
    assert run(["plan", *PLAN, "--device", f"{mine},l40s", "--json", str(plan)]) == 0
    assert capsys.readouterr().out.startswith("GPT on 1 x mine, 1 x l40s\n")
    assert pc.Plan.from_json(plan.read_text()).mesh.device == ("mine", "l40s")
    assert run(["plan", MODEL, "--plan", str(plan), "--device", f"{mine},l40s"]) == 0
    capsys.readouterr()
    cluster = ["--mesh", "auto", "--device", "h100,l40s"]
    assert run(["plan", MODEL, *cluster]) == 2
    assert "a cluster has one kind of device (several given)" in capsys.readouterr().err


def test_a_plan_is_reused_with_its_mesh_precision_and_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    typed = ["--precision", "fp64", "--optimizer", "sgd", "--recompute", "layers.*=yes"]
    assert run(["plan", *PLAN, *typed, "--json", str(first)]) == 0
    assert run(["plan", MODEL, "--plan", str(first), "--json", str(second)]) == 0
    assert pc.Plan.from_json(first.read_text()) == pc.Plan.from_json(second.read_text())
    capsys.readouterr()
    assert run(["plan", MODEL, "--plan", str(first), "--schedule", "gpipe"]) == 1
    assert "the plan has schedule '1f1b' (asked for: 'gpipe')" in capsys.readouterr().err


def test_an_exported_folder_is_reported_compared_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, plan = tmp_path / "out", tmp_path / "a.json"
    assert run(["plan", *PLAN, "--json", str(plan)]) == 0
    report = capsys.readouterr().out
    compiled = ["compile", f"{FILE}:make", "--plan", str(plan), "--export", str(folder)]
    assert run(compiled) == 0
    assert f"torchrun --nproc-per-node 2 {folder / 'main.py'}" in capsys.readouterr().out
    assert (folder / "weights" / "stage_1.safetensors").is_file()
    assert run(["report", str(folder)]) == 0
    assert capsys.readouterr().out == report
    assert run(["diff", str(plan), str(folder)]) == 0
    out = capsys.readouterr().out
    assert "The plans are the same." in out
    assert "time of a step" in out
    assert run(["verify", MODEL, "--plan", str(folder), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_a_program_that_is_not_equal_to_the_model_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from parcompiler.verification.comparison import Errors, Verification

    wrong = Errors("float32", 0.5, 0.0, 0.0, "head.weight", bitwise=False, limit=1e-5)
    monkeypatch.setattr(pc.Program, "verify", lambda *_, **__: Verification(wrong, None))
    assert run(["verify", *PLAN]) == 1
    assert "NOT EQUAL" in capsys.readouterr().out
    cause = "only the program has a gradient of 'head.weight'"
    alone = Errors(
        "float32", 0.0, float("inf"), 0.0, "head.weight", bitwise=False, limit=1e-5, cause=cause
    )
    monkeypatch.setattr(pc.Program, "verify", lambda *_, **__: Verification(alone, None))
    assert run(["verify", *PLAN, "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["native"]
    assert (found["gradient"], found["cause"]) == (None, cause)


def test_two_plans_are_compared_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "a.json", tmp_path / "b.json"
    assert run(["plan", *PLAN, "--stages", "2,2", "--json", str(one)]) == 0
    assert run(["plan", *PLAN, "--stages", "1,3", "--recompute", "full", "--json", str(other)]) == 0
    capsys.readouterr()
    assert run(["diff", str(one), str(other)]) == 0
    out = capsys.readouterr().out
    assert "layers.0: stage 0 (rank 0) -> stage 1 (rank 1)" in out
    assert "now also layers.0, layers.1, norm+head" in out
    assert run(["diff", str(one), str(other), "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {"stages", "recompute"} <= {change["field"] for change in data["changes"]}
    assert data["before"]["predicted"]["seconds"] < data["after"]["predicted"]["seconds"]


def test_help_is_there_without_torch() -> None:
    script = (
        "import sys; from parcompiler.cli import run; code = run(['plan', '--help']);"
        "print(code, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert found.endswith("0 False\n")
    assert "parcompiler plan hf:config.json --mesh pipeline=4,tensor=2,data=2" in found


def test_the_words_of_help_and_completion_are_those_on_offer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert set(SCHEDULES) == {"auto", "search", *KNOWN_SCHEDULES}
    assert (UPDATES, COMPRESSIONS) == (data_updates.WAYS, data_updates.COMPRESSIONS)
    assert set(OUTER) == set(data_updates.OUTER)
    assert set(VOCABULARY) == {"auto", "whole", *METHODS}
    assert set(OPTIMIZERS) == set(KNOWN_OPTIMIZERS)
    assert devices() == names()
    assert {None, *PRECISIONS} == set(KNOWN_PRECISIONS)
    assert run(["plan", *PLAN, "--costs", "guessed"]) == 2
    listed = ", ".join(map(repr, COSTS))
    assert f"costs must be one of {listed} ('guessed' given)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("parcompiler pl", "plan"),
        ("parcompiler plan m.py:make --schedule zb-v", "zb-v"),
        ("parcompiler plan m.py:make --device h2", "h200"),
        ("parcompiler plan m.py:make --mesh pipeline=2,te", "pipeline=2,tensor="),
        ("parcompiler plan m.py:make --mesh au", "auto"),
    ],
)
def test_a_shell_completes_commands_and_values(typed: str, completed: str) -> None:
    words = typed.split()
    environment = {
        **os.environ,
        "_PARCOMPILER_COMPLETE": "bash_complete",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(words) - 1),
    }
    command = [sys.executable, "-c", "from parcompiler.cli import main; main()"]
    found = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    assert [line.partition(",")[2] for line in found.stdout.splitlines()] == [completed]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_of_this_command(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["completion", shell]) == 0
    assert "_PARCOMPILER_COMPLETE" in capsys.readouterr().out


def test_a_closed_pipe_is_no_error() -> None:
    script = (
        "import os, sys; from parcompiler.cli import run;"
        "reading, writing = os.pipe(); os.close(reading); os.dup2(writing, 1);"
        "sys.exit(run(['completion', 'bash']))"
    )
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
