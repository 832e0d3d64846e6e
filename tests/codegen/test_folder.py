"""An export replaces an older one wholly or not at all, and leaves what users have put there."""

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import parcompiler as pc
from parcompiler.codegen import folder as writing
from parcompiler.runtime import tensor_files
from tests.runtime.workers import batch, compiled, mixed

MICROBATCHES = 2


@pytest.fixture(scope="module")
def program() -> pc.Program:
    return compiled(mixed(), MICROBATCHES)


@pytest.fixture(scope="module")
def other() -> pc.Program:
    """The same with other weights."""
    model = mixed()
    torch.nn.init.zeros_(model.head.weight)
    return compiled(model, MICROBATCHES)


def contents(place: Path) -> dict[str, bytes]:
    """Every file, by name."""
    files = (path for path in sorted(place.rglob("*")) if path.is_file())
    return {str(path.relative_to(place)): path.read_bytes() for path in files}


def test_the_list_is_one_that_sha256sum_checks(program: pc.Program, tmp_path: Path) -> None:
    out = program.export(tmp_path / "out", standalone=True)
    listed = {line.split("  ")[1] for line in (out / "SHA256SUMS").read_text().splitlines()}
    assert listed == contents(out).keys() - {"SHA256SUMS"}
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=out, check=True)


def test_help_needs_no_torchrun(
    program: pc.Program,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main = str(program.export(tmp_path / "out") / "main.py")
    monkeypatch.setattr(sys, "argv", [main, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(main)
    assert end.value.code == 0
    assert "usage: main.py" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [main])
    with pytest.raises(SystemExit, match="start this with torchrun --nproc-per-node 1 "):
        runpy.run_path(main)


def test_a_broken_script_is_said_in_a_line(
    program: pc.Program,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = program.export(tmp_path / "out")
    script = out / "rank_0.py"
    script.write_text("import nowhere\n" + script.read_text())
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", [str(out / "main.py")])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"cannot load {script} (")
    assert "edited since the export: rank_0.py): copy or export the folder again" in line


def test_an_older_export_is_replaced_and_what_users_put_there_stays(
    program: pc.Program, other: pc.Program, tmp_path: Path
) -> None:
    out = program.export(tmp_path / "out", standalone=True)
    mine = ("checkpoints/step_3/state", "notes.txt", "weights/mine.bin", "parcompiler/mine.py")
    for name in mine:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(f"my {name}")
    (out / "latest").symlink_to("checkpoints/step_3")
    (out / "__pycache__").mkdir()
    (out / "__pycache__" / "stage_0.pyc").touch()
    (out / "rank_0.py").write_text("edited")
    assert other.export(out) == out
    fresh = other.export(tmp_path / "fresh")
    found = contents(out)
    assert {name: found.pop(name) for name in mine} == {n: f"my {n}".encode() for n in mine}
    assert found == contents(fresh)
    assert (out / "latest").readlink() == Path("checkpoints/step_3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "out"]


def cut_short(path: Path, tensors: object) -> None:
    path.write_bytes(b"some")
    raise OSError(28, os.strerror(28))


def without_a_folder(path: Path, tensors: object) -> None:
    tensor_files.write(path.parent / "no" / "such" / "folder", {"a": torch.ones(1)})


def interrupted(path: Path, tensors: object) -> None:
    raise KeyboardInterrupt


FAILURES: dict[Callable[[Path, object], None], tuple[type[BaseException], str]] = {
    cut_short: (pc.InputError, r"cannot export to .*out \(No space left on device\): nothing"),
    without_a_folder: (pc.InputError, r"cannot export to .*out \(.*No such file"),
    interrupted: (KeyboardInterrupt, "^$"),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("older", [True, False])
def test_an_export_that_fails_leaves_everything_as_it_was(
    program: pc.Program,
    other: pc.Program,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: Callable[[Path, object], None],
    older: bool,
) -> None:
    out = tmp_path / "out"
    if older:
        program.export(out)
        (out / "mine").write_text("mine")
    before = contents(tmp_path)
    monkeypatch.setattr(writing, "write", failure)
    kind, text = FAILURES[failure]
    with pytest.raises(kind, match=text):
        other.export(out)
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if older else [])


def test_an_export_that_cannot_take_its_place_puts_the_older_one_back(
    program: pc.Program, other: pc.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = program.export(tmp_path / "out")
    (out / "mine").write_text("mine")
    before, rename = contents(tmp_path), Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError(16, os.strerror(16))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(pc.InputError, match=r"cannot export .*busy\): nothing that was there has"):
        other.export(out)
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_that_no_export_has_written_is_not_written_over(
    program: pc.Program, tmp_path: Path
) -> None:
    out = program.export(tmp_path / "out")
    (out / "parcompiler").mkdir()
    (out / "parcompiler" / "mine.py").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(pc.InputError, match=r"out/parcompiler has the name of a file of the exp"):
        program.export(out, standalone=True)
    assert contents(tmp_path) == before


def test_a_link_to_a_folder_stays_one(program: pc.Program, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "out"
    link.symlink_to("disk/out")
    for _ in range(2):
        assert program.export(link) == link
        assert link.readlink() == Path("disk/out")
        with pc.load(link).worker() as worker:
            assert worker.step(batch(MICROBATCHES)).isfinite()
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "disk" / "out" / "weights").rename(elsewhere)
    (tmp_path / "disk" / "out" / "weights").symlink_to(elsewhere)
    before = contents(elsewhere)
    program.export(link)
    assert contents(elsewhere) == before
    assert not (link / "weights").is_symlink()


def test_places_that_cannot_be_written_are_named(
    program: pc.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "plan.json").write_text("mine")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "SHA256SUMS").write_text("0123  ../precious\n")
    before = contents(tmp_path)
    for name, text in {
        "file": "exists and is no export of parcompiler",
        "file/out": "cannot export to .*file/out",
        "loop": "loop exists and is no export of parcompiler",
        "plans": "is no export of parcompiler .it has no SHA256SUMS.: give another path",
        "damaged": "lists files outside of its folder",
    }.items():
        with pytest.raises(pc.InputError, match=text):
            program.export(tmp_path / name)

    def forbidden(**_: object) -> str:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(tempfile, "mkdtemp", forbidden)
    with pytest.raises(pc.InputError, match=r"cannot export to .*out \(Permission denied\)"):
        program.export(tmp_path / "out")
    assert contents(tmp_path) == before


def test_ranks_alone_need_no_report(program: pc.Program, tmp_path: Path) -> None:
    out = program.export(tmp_path / "out")
    bare = program.write(tmp_path / "bare", None)
    assert {path.name for path in out.iterdir()} - {path.name for path in bare.iterdir()} == {
        "report.json"
    }
    whole, text = ((path / "README.md").read_text() for path in (out, bare))
    assert whole.startswith(f"{text.rstrip()}\n\n## Report\n\n```\n")
    assert all(path.read_bytes() == (out / path.name).read_bytes() for path in bare.glob("*.py"))


def test_an_empty_folder_is_filled(program: pc.Program, tmp_path: Path) -> None:
    assert pc.load(program.export(tmp_path)).plan == program.plan


def test_scripts_do_not_grow_with_the_number_of_copies(tmp_path: Path) -> None:
    program = compiled(mixed(), MICROBATCHES, mesh=pc.Mesh(pipeline=2, data=512))
    out = program.export(tmp_path / "out", ranks=[700, 1])
    scripts = sorted(path.name for path in out.glob("rank_*.py"))
    assert scripts == ["rank_0.py", "rank_1.py", "rank_512.py", "rank_700.py"]
    assert "It runs `rank_512.py`" in (out / "rank_700.py").read_text()
    loaded = pc.load(out)
    for rank in (0, 511, 512, 700, 1023):
        assert loaded.instructions(rank) == program.instructions(rank)
    with pytest.raises(pc.InputError, match="there is no rank 1024"):
        program.export(out, ranks=[1024])
    many = pc.load(program.export(out)).path
    assert len(list(many.glob("rank_*.py"))) == 2


class Kept(nn.Module):
    """Rows that are no padding, as many as there are, in another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x[(x != 0).any(-1)].view(-1, 2, 2)
        y: torch.Tensor = self.layer(rows.flatten(1))
        return y.square().mean()


def test_sizes_that_follow_from_data_are_written_as_they_are(tmp_path: Path) -> None:
    program = pc.compile(Kept(), pc.Mesh(), {"x": torch.ones(2, 4)}, microbatches=2)
    (stage,) = program.export(tmp_path / "kept").rglob("stage_0.py")
    assert ".view(-1, 2, 2)" in stage.read_text()
