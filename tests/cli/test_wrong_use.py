"""Wrong use is said in one message, with exit code 2; faults of a plan with exit code 1."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parcompiler as pc
from parcompiler.cli import run
from parcompiler.plan import Shape, StageChoice
from parcompiler.runtime.resuming import alone

MODEL = "tests.cli.models:make"
FILE = str(Path(__file__).with_name("models.py"))
MESH = ("--mesh", "pipeline=2")
RUN = ("--data", "README.md", "--save", "build/no run")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code, and what is on standard error; nothing is on standard output."""
    code = run(arguments)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return code, err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Usage: parcompiler"),
        (("calibrat",), "No such command 'calibrat'"),
        (("calibrate",), "Missing option '--output'"),
        (("calibrate", "--output", "tests"), "cannot write tests: it is a folder"),
        (("calibrate", "--output", "no/d.json"), "cannot write no/d.json: there is no folder no"),
        (("calibrate", "--output", "d.json", "--like", "abacus"), "no device 'abacus' in the cat"),
        (
            ("calibrate", "--output", "d.json", "--like", "no.json"),
            "cannot read no.json (No such file",
        ),
        (("calibrate", "--output", "d.json", "--dtypes", "float32,"), "'float32,' has an empty"),
        (("calibrate", "--output", "d.json", "--dtypes", "int8"), "calibrate measures float32, "),
        (("calibrate", "--output", "d.json", "--seconds", "0"), "0.0 is not in the range 0<x<=600"),
        (("calibrate", "--output", "d.json", "--threads", "0"), "0 is not in the range 1<=x<=4096"),
        (("calibrate", "--output", "d.json", "--name", "h100"), "must begin with 'cpu-'"),
        (("plan",), "Missing argument 'MODEL'"),
        (("plan", MODEL), "--mesh is missing"),
        (("plan", MODEL, "--mesh", "pipe=2"), "'pipe=2' is not AXIS=N: write pipeline=4,tensor=2"),
        (("plan", MODEL, "--mesh", "pipeline=0"), "'pipeline=0' needs a positive integer"),
        (("plan", MODEL, "--mesh", "data"), "'data' needs a positive integer: write data=2"),
        (("plan", MODEL, "--mesh", "data=2,data=3"), "axis 'data' is given twice"),
        (("plan", MODEL, "--mesh", "auto", "--nodes", "0"), "0 is not in the range x>=1"),
        (("plan", MODEL, *MESH, "--nodes", "2"), "--nodes is for --mesh auto"),
        (
            ("plan", MODEL, *MESH, "--devices-per-node", "2"),
            "--devices-per-node is for --mesh auto",
        ),
        (("plan", MODEL, "--mesh", "auto", "--plan", "p.json"), "a plan is for one mesh"),
        (("plan", MODEL, *MESH, "--device", "h9"), "no device 'h9' in the catalogue (known: a100"),
        (("plan", MODEL, *MESH, "--device", "no.json"), "cannot read no.json (No such file"),
        (
            ("plan", MODEL, *MESH, "--average-every", "5"),
            "--average-every is for --updates local: leave it out",
        ),
        (("plan", MODEL, *MESH, "--schedule", "fast"), "schedule must be one of 'auto', 'search'"),
        (("plan", MODEL, *MESH, "--schedule", "no.csv"), "cannot read no.csv (No such file"),
        (("plan", MODEL, *MESH, "--vocabulary", "no"), "vocabulary must be one of 'auto', 'whole'"),
        (("plan", MODEL, *MESH, "--stages", "3,x"), "'3,x' is none of auto, even, or the number"),
        (
            ("plan", MODEL, *MESH, "--recompute", "some"),
            "'some' is none of auto, none, selective, full, offload",
        ),
        (("plan", MODEL, *MESH, "--shard", "head"), "'head' is no pin: write '*.ffn.up.weight=S"),
        (("plan", MODEL, *MESH, "--shard", "head=Q"), "'Q' is no placement: write 'R'"),
        (("plan", MODEL, *MESH, "--precision", "fp8"), "precision must be one of None, 'fp32'"),
        (
            ("plan", MODEL, *MESH, "--optimizer", "lion"),
            "optimizer must be one of 'adagrad', 'adamw'",
        ),
        (("plan", MODEL, *MESH, "--microbatches", "0"), "0 is not in the range x>=1"),
        (("plan", MODEL, *MESH, "--microbatch", "few"), "'few' is none of given, auto, or numbers"),
        (("plan", MODEL, *MESH, "--rows", "4"), "--rows is for hf: models"),
        (("plan", MODEL, *MESH, "--html", "no/r.html"), "cannot write no/r.html: there is no fol"),
        (("plan", MODEL, *MESH, "--trace", "tests"), "cannot write tests: it is a folder"),
        (
            ("plan", MODEL, "--mesh", "pipeline=1000000"),
            "'pipeline' may be at most 16,384 (10",
        ),
        (("plan", MODEL, "--mesh", "pipeline=" + "9" * 5000), "needs a positive integer"),
        (("plan", MODEL, *MESH, "--microbatches", "1000000"), "may be at most 262,144 (1000000 g"),
        (("plan", MODEL, *MESH, "--virtual-stages", "9999999"), "may be at most 262,144 (9999999"),
        (("plan", MODEL, *MESH, "--shard", f"a=S({'9' * 5000})"), "is no placement: write 'R'"),
        (("plan", MODEL, *MESH, "--memory-margin", "nan"), "nan is not a finite number"),
        (("plan", MODEL, *MESH, "--rows", "9" * 20), "is more than 2,147,483,647"),
        (("plan", MODEL, *MESH, "--plan", ""), "'' is no path (it is empty): write . for the cur"),
        (("plan", MODEL, *MESH, "--plan", "p" * 300), "is no path (File name too long)"),
        (("plan", MODEL, *MESH, "--device", "h100," * 99), "a device for each pipeline coordinate"),
        (
            ("plan", "hf:meta-llama/Llama-3-8B", *MESH),
            "hf: takes the path of a config.json, and",
        ),
        (("compile", MODEL, *MESH), "Missing option '--export'"),
        (("compile", MODEL, *MESH, "--export", FILE), "models.py: it is a file"),
        (("compile", MODEL, *MESH, "--export", f"{FILE}/out"), "models.py is a file"),
        (("compile", MODEL, *MESH, "--export", "tests"), "tests: it holds other things than an"),
        (("compile", MODEL, *MESH, "--export", ""), "'' is no path (it is empty)"),
        (
            ("compile", MODEL, *MESH, "--export", "x", "--pretrained", "tests"),
            "tests has no published weights",
        ),
        (
            ("compile", "hf:examples/gpt2-tiny.json", *MESH, "--export", "x", "--weights"),
            "an hf: model has no weights to write: compile with --pretrained FOLDER",
        ),
        (
            ("compile", MODEL, *MESH, "--device", "h100,l40s", "--export", "x", "--launcher=slurm"),
            "writes a job of equal nodes, and the mesh has several kinds of devices (h100, l40s)",
        ),
        (("calibrate", "--output", "d.json", "--threads", "9999999999"), "not in the range 1<=x<="),
        (("calibrate", "--output", "d.json", "--seconds", "nan"), "nan is not a finite number"),
        (("train", MODEL, *MESH, *RUN, "--lr", "-1"), "-1.0 is not in the range x>=0"),
        (("train", MODEL, *MESH, *RUN, "--weight-decay", "-1"), "-1.0 is not in the range x>=0"),
        (("train", MODEL, *MESH, *RUN, "--max-norm", "0"), "0.0 is not in the range x>0"),
        (("train", MODEL, *MESH, *RUN, "--seed", "9" * 20), "is not in the range 0<=x<=92233720"),
        (("train", MODEL, *MESH, *RUN, "--lr", "nan"), "nan is not a finite number"),
        (("train", MODEL, *MESH, *RUN, "--lr", "inf"), "inf is not a finite number"),
        (("train", MODEL, *MESH, *RUN, "--weight-decay", "nan"), "nan is not a finite number"),
        (("train", MODEL, *MESH, *RUN, "--max-norm", "nan"), "nan is not a finite number"),
        (("train", MODEL, *MESH, *RUN, "--hold-out", "nan"), "nan is not a finite number"),
        (("train", MODEL, *MESH, "--save", "build/no run", "--data", ""), "'' is no path (it is "),
        (("train", MODEL, *MESH, "--data", FILE, "--save", ""), "'' is no path (it is empty)"),
        (("train", MODEL, *MESH, *RUN, "--data", "no.txt"), "cannot read no.txt (there is no such"),
        (("train", MODEL, *MESH, *RUN, "--data", "a.bin"), "one file of tokens, or texts (2 paths"),
        (
            ("train", MODEL, *MESH, *RUN, "--data", "docs/images/report.png"),
            "takes texts in UTF-8",
        ),
        (
            ("train", MODEL, *MESH, *RUN, "--tokenizer", "no.json"),
            "cannot read no.json (there is no such file",
        ),
        (
            ("train", MODEL, *MESH, *RUN, "--tokenizer", "tests"),
            "cannot read tests (it is a folder): --tokenizer takes a tokenizer.json",
        ),
        (("train", MODEL, *MESH, *RUN, "--tokenizer", FILE), "models.py is not a tokenizer.json ("),
        (
            ("train", MODEL, *MESH, *RUN, "--hold-out", "0", "--evaluate-every", "5"),
            "--evaluate-every needs rows to evaluate: give --hold-out SHARE above 0",
        ),
        (("train", MODEL, *MESH, *RUN, "--resume", ""), "'' is no path (it is empty): write auto"),
        (
            ("train", MODEL, *MESH, *RUN, "--resume", "no run"),
            "no checkpoint in no run (there is n",
        ),
        (("train", MODEL, *MESH, *RUN, "--resume", FILE), "models.py (it is not a folder)"),
        (("train", MODEL, *MESH, *RUN, "--pretrained", "tests"), "tests has no published weights"),
        (("train", MODEL, *MESH, *RUN, "--profile", "9-2"), "takes steps from 1 to 200, the"),
        (("report", "no"), "no is no exported program: it has no plan.json"),
        (("report", "tests"), "tests is no exported program: it has no plan.json"),
        (("diff", "no.json", "no.json"), "cannot read no.json (No such file or directory)"),
        (("diff", "tests", "tests"), "tests is no exported program"),
        (("diff", "Makefile", "Makefile"), "Makefile: the plan is no JSON"),
        (("completion", "dos"), "'dos' is not one of 'bash', 'zsh', 'fish'"),
    ],
)
def test_wrong_use_is_named(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    code, err = said(capsys, *arguments)
    assert code == 2
    assert message in err
    assert "printed by the factory" not in err  # nothing is captured


def test_missing_devices_and_packages_are_named_before_the_model_is_made(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for arguments, message in (
        (("train", MODEL, *MESH, *RUN, "--tensorboard"), "--tensorboard needs the package"),
        (("train", MODEL, *MESH, *RUN, "--device", "h100"), "needs CUDA device 1 (0 found)"),
        (("verify", MODEL, *MESH, "--on", "cuda"), "finds no CUDA device on this machine"),
    ):
        code, err = said(capsys, *arguments)
        assert code != 0
        assert message in err
        assert "printed by the factory" not in err


def test_started_processes_that_are_not_the_ranks_are_named_before_the_model_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr("parcompiler.runtime.joining.rendezvous", lambda _: dist.HashStore())
    monkeypatch.setattr("parcompiler.cli.train.LAST_WORDS", 0.0)
    line = ("train", MODEL, *MESH, "--data", FILE, "--save", str(tmp_path))
    code, err = said(capsys, *line)
    assert code == 2
    assert "the mesh has 2 ranks, and 3 processes were started" in err
    assert "printed by the factory" not in err


@pytest.mark.parametrize(
    ("tokens", "share", "message"),
    [
        (40, "0.1", "has 9 rows of 4 tokens, and a step takes 16: give more text"),
        (400, "0.99", "--hold-out 0.99 leaves 1 of 99 rows to train on, and a step takes 16"),
        (400, "0.001", "--hold-out 0.001 leaves 0 of 99 rows for evaluations, and one takes at"),
    ],
)
def test_too_few_rows_are_named_before_any_rank_starts(
    tokens: int,
    share: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("parcompiler.cli.train._ranks", lambda *_: pytest.fail("ranks started"))
    file = tmp_path / "tokens.bin"
    pc.write_tokens(file, torch.arange(tokens) % 16)
    line = ("train", MODEL, *MESH, "--data", str(file), "--save", str(tmp_path / "run"))
    code, err = said(capsys, *line, "--hold-out", share)
    assert code == 2
    assert message in err


def test_tokens_that_cannot_be_written_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokens.bin").mkdir()
    model = "tests/cli/models.py:wordy"
    code, err = said(capsys, "train", model, *MESH, "--data", FILE, "--save", str(tmp_path))
    assert code == 2
    assert f"cannot write {tmp_path} (Is a directory)" in err


def test_stages_on_the_rank_of_no_pipeline_and_memory_of_no_byte_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, err = said(capsys, "plan", MODEL, "--mesh", "data=1", "--virtual-stages", "3")
    assert code == 1
    assert "for a pipeline of 1 (virtual_stages=3 given): leave virtual_stages out" in err
    code, err = said(capsys, "plan", MODEL, *MESH, "--memory-margin", "0.99999999999")
    assert code == 1
    assert "memory" in err
    assert "not expected" not in err
    code, err = said(capsys, "plan", MODEL, "--mesh", "auto", "--microbatch", "9999999")
    assert code == 2
    assert "numbers of rows, each from 1 to 262,144 ((9999999,) given)" in err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("models", "'models' is no MODEL: write package.module:factory"),
        ("c.json", "for a configuration of transformers write hf:c.json"),
        (FILE, f"say which function makes it, as in {FILE}:make"),
        ("no.py:make", "there is no file no.py"),
        ("no.such:make", "no.such does not import (ModuleNotFoundError: No module named 'no')"),
        (f"{FILE}:mak", "has no 'mak' (did you mean make?)"),
        (f"{FILE}:zzzzzz", "has no 'zzzzzz' (it has: make, evaluating, empty, failing, loose"),
        (f"{FILE}:MODEL", "'MODEL'"),
        (f"{FILE}:empty", "must return (model, inputs) or (model, inputs, loss): what it returned"),
        (f"{FILE}:unreduced", "loss is a function of the model's outputs: it is of type str"),
        (f"{FILE}:loose", "or a tuple of positional ones: they are of type Tensor"),
        (f"{FILE}:failing", "raised ValueError: no such size, at "),
    ],
)
def test_a_model_that_is_none_is_named(
    model: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = said(capsys, "plan", model, *MESH)
    assert code == 2
    assert message in err


def test_a_file_that_does_not_import_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import json\njson.nothing\n")
    code, err = said(capsys, "plan", f"{path}:make", *MESH)
    assert code == 2
    assert f"{path} does not import (AttributeError: module 'json' has no attribute" in err
    assert f"at {path}:2)" in err
    path.write_text("def make(:\n")
    code, err = said(capsys, "plan", f"{path}:make", *MESH)
    assert code == 2
    assert "SyntaxError: invalid syntax (broken.py, line 1)" in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_named_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o500)
    for arguments in (("plan", "--json"), ("compile", "--export")):
        command, option = arguments
        code, err = said(capsys, command, MODEL, *MESH, option, str(tmp_path / "x"))
        assert code == 2
        assert "permission" in err
        assert "printed by the factory" not in err


def test_without_permission_no_model_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_arguments: False)
    for command, option in (("plan", "--json"), ("compile", "--export")):
        code, err = said(capsys, command, MODEL, *MESH, option, str(tmp_path / "x"))
        assert code == 2
        assert "no permission" in err
        assert "printed by the factory" not in err


def test_a_folder_that_another_run_writes_into_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(*_arguments: object, **_options: object) -> None:
        message = "nothing is compiled here"
        raise pc.InputError(message)

    monkeypatch.setattr("parcompiler.cli.train.compiled", compiled)
    line = ("train", MODEL, *MESH, "--data", FILE, "--save", str(tmp_path))
    with alone(tmp_path):
        code, err = said(capsys, *line)
    assert code == 2
    assert f"another run writes into {tmp_path}: wait until it ends" in err
    for _ in range(2):  # each lets go of it
        assert "nothing is compiled here" in said(capsys, *line)[1]


def test_a_run_whose_only_checkpoint_is_damaged_does_not_begin_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "step_2").mkdir(parents=True)
    data = tmp_path / "text.txt"
    data.write_text("a text " * 100)
    command = ["train", MODEL, *MESH, "--data", str(data), "--save", str(tmp_path / "run")]
    assert run(command) == 2
    assert "step_2 is damaged" in capsys.readouterr().err


def test_a_full_disk_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object, **_options: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    quick = ("--microbatches", "2", "--schedule", "1f1b", "--vocabulary", "whole")
    code, err = said(capsys, "plan", MODEL, *MESH, *quick, "--json", str(tmp_path / "x"))
    assert code == 2
    assert "(No space left on device)" in err


def edited(**fields: Any) -> str:
    """A plan of no model, with fields changed by hand."""
    stages = (StageChoice(("a", "b"), 0), StageChoice(("c",), 1))
    plan = pc.Plan("GPT", "0f", Shape(pipeline=2), 8, schedule="1f1b", granularity=1, stages=stages)
    return json.dumps(json.loads(plan.to_json()) | fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (edited(microbatches="8"), 'plan.microbatches must be an integer ("8" found)'),
        (edited(microbatches=0), "plan.microbatches must be at least 1 (0 found)"),
        (
            edited(mesh={"pipeline": -2}),
            "plan.mesh: mesh axis 'pipeline' must be a positive integer (-2 given)",
        ),
        (edited(mesh={"data": 10**30}), "plan.mesh: mesh axis 'data' may be at most 1,048,576"),
        (edited(shedule="1f1b"), "plan has an unknown field 'shedule' (known:"),
        (
            edited(stages=[{"blocks": ["a"], "rank": 2}]),
            "plan.stages[0].rank must be from 0 to 1, as mesh.pipeline says (2 found)",
        ),
        (
            edited(stages=[{"blocks": ["a"], "rank": 0}, {"blocks": ["a"], "rank": 1}]),
            "plan.stages[1].blocks names 'a', which stands in the stages already",
        ),
        (edited(stages=[{"blocks": [], "rank": 0}]), "plan.stages[0].blocks must name at least"),
        (edited(orders=["0F0"]), "plan.orders must have a row for each of 2 pipeline ranks (1 fo"),
        (
            edited(orders=["0F0 0B0", "1F0 huh"]),
            "plan.orders: row 2, column 2 is 'huh', which is no action",
        ),
        (edited(predicted={"seconds": "soon"}), "predicted"),
        ("[" * 100_000, "nests too deeply"),
        ("{", "the plan is no JSON: Expecting property name"),
        ("7", "plan must be an object (7 found)"),
    ],
)
@pytest.mark.parametrize("command", ["diff", "plan"])
def test_a_plan_edited_into_nonsense_is_named_with_its_field(
    command: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    arguments = (str(path), str(path)) if command == "diff" else (MODEL, "--plan", str(path))
    code, err = said(capsys, command, *arguments)
    assert code == 2
    assert str(path) in err
    assert message in err


def test_a_plan_that_does_not_fit_is_named_with_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    quick = ("--microbatches", "2", "--schedule", "1f1b", "--vocabulary", "whole")
    assert run(["plan", MODEL, *MESH, *quick, "--json", str(path), "-q"]) == 0
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"granularity": 99}))
    capsys.readouterr()
    code, err = said(capsys, "plan", MODEL, "--plan", str(path))
    assert code == 1
    assert "the plan has granularity 99 (the model has: " in err
    assert err.endswith(f"(the plan is that of {path})\n")


def test_a_damaged_export_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text(edited())
    code, err = said(capsys, "report", str(tmp_path))
    assert code == 2
    assert f"cannot read {tmp_path / 'report.json'}" in err
    (tmp_path / "report.json").write_text("{}")
    code, err = said(capsys, "report", str(tmp_path))
    assert code == 2
    assert "report lacks the field" in err


def test_what_cannot_be_captured_or_planned_is_exit_code_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, err = said(capsys, "plan", "tests.cli.models:unruly", *MESH)
    assert code == 1
    assert err.startswith("error: ")
    code, err = said(capsys, "plan", MODEL, "--mesh", "pipeline=40", "--schedule", "1f1b")
    assert code == 1
    assert "more stages than blocks" in err


def test_an_unexpected_error_is_one_message_and_a_traceback_with_debug(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_arguments: object, **_options: object) -> None:
        message = "x"
        raise KeyError(message)

    monkeypatch.setattr("parcompiler.compiler.compile", broken)
    code, err = said(capsys, "plan", MODEL, *MESH)
    assert code == 1
    assert "error: KeyError: 'x'" in err
    assert run(["plan", MODEL, *MESH, "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupted_command_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("parcompiler.compiler.compile", interrupted)
    code, err = said(capsys, "plan", MODEL, *MESH)
    assert code == 130
    assert err.endswith("interrupted\n")
