"""The command line of emitted scripts: the files that it reads, and what it stops at."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import parcompiler as pc
from parcompiler.runtime import command_line, run
from parcompiler.runtime.resuming import alone
from tests.runtime.workers import CLASSES, ROWS, WIDTH, compiled, mixed

MICROBATCHES = 2


@pytest.fixture(scope="module")
def program() -> pc.Program:
    return compiled(mixed(), MICROBATCHES)


def data(path: Path, **tensors: torch.Tensor) -> str:
    """A file of three batches, with these tensors instead."""
    rows = 3 * ROWS * MICROBATCHES
    good = {"x": torch.randn(rows, WIDTH), "labels": torch.randint(CLASSES, (rows,))}
    save_file(good | tensors, path / "data.safetensors")
    return str(path / "data.safetensors")


def test_a_file_is_read_round_and_round(
    program: pc.Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(program.worker, ["--steps", "6", "--lr", "0", "--data", data(tmp_path)])
    lines = [line.split()[3] for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == lines[3:]
    assert len(set(lines)) == 3


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"labels": torch.tensor(3)}, r"'labels' in .* must have rows of shape \(\) \(it is a"),
        (
            {"labels": torch.zeros(12)},
            r"batch\['labels'\] must have dtype torch.int64 \(torch.floa",
        ),
        ({"x": torch.zeros(12, 2)}, r"batch\['x'\] must have shape \(4, 6\).*\(\(4, 2\) given\)"),
        ({"x": torch.zeros(9, 6)}, r"same number of samples \('x': 9, 'labels': 12\)"),
        (
            {"x": torch.zeros(3, 6), "labels": torch.zeros(3).long()},
            r"fewer samples than a step takes \(3 of 4: 4 for",
        ),
    ],
)
def test_a_file_of_other_tensors_is_refused(
    program: pc.Program, tmp_path: Path, tensors: dict[str, torch.Tensor], text: str
) -> None:
    with pytest.raises(pc.InputError, match=text):
        run(program.worker, ["--data", data(tmp_path, **tensors)])


def test_what_is_no_file_of_tensors_is_refused(program: pc.Program, tmp_path: Path) -> None:
    (tmp_path / "nested").write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)
    for name, text in {
        "": r"cannot read .* \(it is a folder\)",
        "nested": "no safetensors file",
    }.items():
        with pytest.raises(pc.InputError, match=text):
            run(program.worker, ["--data", str(tmp_path / name)])


def test_a_loss_that_is_not_finite_stops_on_request(program: pc.Program, tmp_path: Path) -> None:
    rows = ROWS * MICROBATCHES
    arguments = [
        "--steps",
        "1",
        "--data",
        data(tmp_path, x=torch.full((3 * rows, WIDTH), torch.inf)),
    ]
    run(program.worker, arguments)
    arguments += ["--error-if-nonfinite"]
    records = []

    def make(timeout: float) -> pc.Worker:
        worker = program.worker(timeout=timeout)
        records.append(worker.flight)
        return worker

    run_folder, other = tmp_path / "run", tmp_path / "other"
    for folder in (["--save", str(run_folder)], ["--flight", str(other)]):
        with pytest.raises(pc.LaunchError, match=r"the loss of step 1 is not finite \(nan\)"):
            run(make, [*arguments, *folder])
    # the last instructions stand beside the checkpoints, or where the user says
    assert [record.folder for record in records] == [run_folder / "flight", other]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--profile 4-2", r"--profile takes steps from 1 to 6, .* \('4-2' given\)"),
        ("--profile 2-20", r"--profile takes steps from 1 to 6, .* \('2-20' given\)"),
        ("--profile 9", r"--profile takes steps from 1 to 6, .* \('9' given\)"),
        ("--profile x", "--profile takes steps, such as 10-12 \\('x' given\\)"),
        ("--hold-out 1.5", "--hold-out takes a share of the rows below 1 \\(1.5 given\\)"),
        ("--hold-out 0.1", r"give --data FILE.bin with it \(no --data given\)"),
        ("--hold-out 0.1 --data x.safetensors", r"FILE.bin with it \(x.safetensors given\)"),
        ("--evaluate-every 2", "--evaluate-every needs --data FILE.bin and --hold-out SHARE"),
        ("--evaluate-steps 2", "--evaluate-steps needs --data FILE.bin and --hold-out SHARE"),
        ("--labels same", r"--labels is for a file of tokens: .* \(no --data given\)"),
        ("--metrics m.jsonl", "--metrics needs --log-every N"),
        ("--tensorboard events", "--tensorboard needs --log-every N"),
        ("--data no.safetensors", r"cannot read no.safetensors \(there is no such file\)"),
        ("--data no.bin", "no.bin is not a file of tokens"),
        ("--every 2", "--every needs --save DIR"),
        ("--resume auto", "--resume auto needs --save DIR"),
    ],
)
def test_options_that_no_run_can_have_are_refused_before_it(
    program: pc.Program, options: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(pc.InputError, match=text):
        run(lambda *_: pytest.fail("a rank started"), ["--steps", "6", *options.split()])
    assert "step" not in capsys.readouterr().out


@pytest.mark.parametrize(("size", "whose"), [("1", ""), ("2", "rank 1: ")])
def test_a_script_prints_what_is_wrong_without_a_traceback(
    size: str, whose: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["main.py", "--resume", "auto"])
    if whose:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(SystemExit) as end:
        run(lambda *_: pytest.fail("a rank started"))
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"{whose}--resume auto needs --save DIR")


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--lr=inf", "must be at least 0, and finite ('inf' given)"),
        ("--lr=fast", "must be a number ('fast' given)"),
        ("--max-norm=0", "must be above 0 ('0' given)"),
        ("--max-norm=nan", "must be above 0 ('nan' given)"),
        ("--hold-out=nan", "must be at least 0, and finite ('nan' given)"),
        ("--timeout=-1", "must be above 0 ('-1' given)"),
        ("--steps=1.5", "must be an integer ('1.5' given)"),
        ("--check-batches=-1", "must be at least 0 ('-1' given)"),
        ("--seed=-1", "must be at least 0 ('-1' given)"),
        (f"--seed={2**63}", f"must be at most {2**63 - 1} ('{2**63}' given)"),
        ("--data=", "is empty: write . for the current folder"),
        ("--save=", "is empty: write . for the current folder"),
        ("--resume=", "is empty: write . for the current folder"),
        ("--publish=", "is empty: write . for the current folder"),
    ],
)
def test_a_value_that_no_run_can_have_is_named(
    option: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        command_line([option])
    assert end.value.code == 2
    assert f"{option.partition('=')[0]}: {text}" in capsys.readouterr().err


def test_a_folder_that_another_run_writes_into_is_refused(
    program: pc.Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--steps", "1", "--save", str(tmp_path)]
    with alone(tmp_path):
        with pytest.raises(pc.InputError, match=r"another run writes into .*: wait until it ends"):
            run(program.worker, arguments)
        assert "step" not in capsys.readouterr().out
        run(program.worker, [*arguments, "--locked"])  # by whoever started the ranks
    run(program.worker, arguments)
    with alone(tmp_path):
        pass  # the run lets go of it


def test_a_folder_that_cannot_be_written_into_is_refused_before_the_first_step(
    program: pc.Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    refused = r"cannot save into .*run:\nrank 0: Not a directory"
    for option in ("--save", "--publish"):
        with pytest.raises(pc.InputError, match=refused):
            run(program.worker, ["--steps", "1", option, str(tmp_path / "file" / "run")])
        assert "step" not in capsys.readouterr().out
    run(program.worker, ["--steps", "1", "--save", str(tmp_path / "run")])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step_00000001"]


@pytest.mark.parametrize(
    ("option", "least"),
    [
        ("--evaluate-every", 1), ("--evaluate-steps", 1), ("--log-every", 1), ("--steps", 0),
        ("--warmup", 0),
    ],
)  # fmt: skip
def test_a_number_of_steps_is_positive(
    program: pc.Program, option: str, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(program.worker, [option, str(least - 1)])
    assert f"{option}: must be at least {least}" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--lr", "--weight-decay"])
@pytest.mark.parametrize("value", ["-0.1", "nan"])
def test_a_rate_is_not_negative(
    program: pc.Program, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(program.worker, [f"{option}={value}"])
    assert f"{option}: must be at least 0" in capsys.readouterr().err


def test_the_first_rank_alone_prints_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, shown in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end:
            command_line(["--help"])
        assert end.value.code == 0
        assert ("--hold-out SHARE" in capsys.readouterr().out) == shown


def test_a_profile_of_a_run_that_goes_on_begins_where_it_does(
    program: pc.Program, tmp_path: Path
) -> None:
    folder = ["--save", str(tmp_path / "run")]
    run(program.worker, ["--steps", "2", *folder])
    run(program.worker, ["--steps", "4", "--profile", "2-3", "--resume", "auto", *folder])
    assert (tmp_path / "run" / "profile" / "rank_0.json").is_file()


def test_a_profile_of_steps_that_were_made_is_said_to_be_none(
    program: pc.Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ["--save", str(tmp_path / "run")]
    run(program.worker, ["--steps", "2", *folder])
    assert re.findall(r"step (\d+) loss", capsys.readouterr().out) == ["1", "2"]
    run(program.worker, ["--steps", "3", "--profile", "1-2", "--resume", "auto", *folder])
    assert "no profile: steps 1-2 were made before\n" in capsys.readouterr().out


def test_a_run_that_goes_on_has_the_rates_that_are_given(
    program: pc.Program, tmp_path: Path
) -> None:
    """And those of its checkpoint where none are."""

    def rates(steps: int, *given: str) -> set[tuple[float, float]]:
        folder = tmp_path / f"run {steps}"
        resumed = ["--resume", str(tmp_path / "run 1")] if steps > 1 else []
        run(program.worker, ["--steps", str(steps), "--save", str(folder), *resumed, *given])
        (path,) = folder.glob("step_*")
        groups = json.loads((path / "checkpoint.json").read_text())["optimizer"]["groups"]
        return {(g["options"]["lr"], g["options"]["weight_decay"]) for g in groups}

    assert rates(1, "--lr", "0.25") == {(0.25, 0.01)}
    assert rates(2) == {(0.25, 0.01)}
    assert rates(3, "--lr", "0.5") == {(0.5, 0.01)}
    assert rates(4, "--weight-decay", "0.125") == {(0.25, 0.0), (0.25, 0.125)}
    assert rates(5, "--warmup", "10") == {(0.25 * 5 / 10, 0.01)}


def test_an_input_without_rows_is_in_every_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(self.layer(x), x[:, :1]) * scale

    inputs = {"x": torch.ones(ROWS, WIDTH), "scale": torch.tensor(2.0)}
    scaled = pc.compile(Scaled(), pc.Mesh(), inputs, microbatches=MICROBATCHES)
    path = tmp_path / "data.safetensors"
    save_file({"x": torch.ones(2 * ROWS * MICROBATCHES, WIDTH), "scale": torch.zeros(())}, path)
    run(scaled.worker, ["--steps", "3", "--data", str(path)])
    assert capsys.readouterr().out.count("loss 0.00000000") == 3
