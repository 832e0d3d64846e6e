"""The command line of emitted scripts: the files that it reads, and what it stops at."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import parcompiler as pc
from parcompiler.runtime import run
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
        ({"labels": torch.tensor(3)}, r"'labels' in .* must have rows of shape \(\) \(a scalar"),
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
    for name, text in {"": "cannot read .*Is a directory", "nested": "no safetensors file"}.items():
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
