"""Exported folders read back: without the plan's device, and without traces in this process."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import parcompiler as pc
from tests.runtime.workers import batch, compiled, mixed

MICROBATCHES = 2


@pytest.fixture(scope="module")
def program() -> pc.Program:
    return compiled(mixed(), MICROBATCHES)


def test_a_plan_for_another_device_can_be_read_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PARCOMPILER_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    program = compiled(mixed(), MICROBATCHES, mesh=pc.Mesh(device="h100"))
    loaded = pc.load(program.export(tmp_path / "out"))
    assert loaded.plan == program.plan
    assert loaded.instructions(0) == program.instructions(0)
    assert str(loaded.report()) == str(program.report())
    with pytest.raises(pc.LaunchError, match="for device 'h100' and needs CUDA device 0"):
        loaded.worker()


def test_a_loaded_worker_is_the_worker_of_the_program(program: pc.Program, tmp_path: Path) -> None:
    folder = program.export(tmp_path / "my out")
    with program.worker() as worker:
        wanted = worker.step(batch(MICROBATCHES))
    with pc.load(folder).worker() as worker:
        assert torch.equal(worker.step(batch(MICROBATCHES)), wanted)


def test_loading_leaves_the_modules_and_paths_of_this_process_alone(
    program: pc.Program, tmp_path: Path
) -> None:
    folder = program.export(tmp_path / "out")
    mine = type(sys)("stage_0")
    sys.modules["stage_0"] = mine
    paths = list(sys.path)
    try:
        pc.load(folder).worker().close()
        assert sys.modules["stage_0"] is mine
    finally:
        del sys.modules["stage_0"]
    assert sys.path == paths
    assert not list(folder.rglob("__pycache__"))


def test_several_folders_are_loaded_in_one_process(program: pc.Program, tmp_path: Path) -> None:
    doubled = mixed().double()
    data = {key: t.double() if t.is_floating_point() else t for key, t in batch(1).items()}
    other = pc.compile(doubled, pc.Mesh(), data, microbatches=1)
    folders = [item.export(tmp_path / str(n)) for n, item in enumerate((program, other))]
    for _ in range(2):
        with pc.load(folders[0]).worker() as worker:
            assert worker.step(batch(MICROBATCHES)).dtype == torch.float32
        with pc.load(folders[1]).worker() as worker:
            assert worker.step(data).dtype == torch.float64


@pytest.mark.parametrize("rank", [-1, 1])
def test_a_rank_that_is_not_there_is_refused(
    program: pc.Program, tmp_path: Path, rank: int
) -> None:
    with pytest.raises(pc.InputError, match=f"has no rank {rank}"):
        pc.load(program.export(tmp_path / "out")).instructions(rank)
    with pytest.raises(pc.InputError, match=f"there is no rank {rank} "):
        program.instructions(rank)


def test_a_damaged_plan_is_refused(program: pc.Program, tmp_path: Path) -> None:
    folder = program.export(tmp_path / "out")
    (folder / "plan.json").write_text('{"model": 3}')
    with pytest.raises(pc.InputError, match=r"plan lacks the field|must be a string"):
        pc.load(folder)


def test_a_script_without_instructions_is_refused(program: pc.Program, tmp_path: Path) -> None:
    folder = program.export(tmp_path / "out")
    (folder / "rank_0.py").write_text("INSTRUCTIONS = 3\n")
    with pytest.raises(pc.InputError, match="has no INSTRUCTIONS: export the program again"):
        pc.load(folder).instructions(0)


def removed(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_at_its_end(path: Path) -> None:
    text = path.read_text()
    path.write_text(text[: text.index("def worker")])


def one_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def garbage(path: Path) -> None:
    path.write_bytes(b"\xff\x00 no text")


def null_in_a_name(path: Path) -> None:
    path.write_text(path.read_text() + "0123  a\0b.py\n")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "damage", "text"),
    [
        (
            "stage_0.py",
            removed,
            r"cannot read .*stage_0.py \(No such file or directory\): copy or ",
        ),
        ("stage_0.py", cut, r"cannot load .*rank_0.py \(.*; edited since the export: stage_0.py\)"),
        ("rank_0.py", cut_at_its_end, r"AttributeError.*; edited since the export: rank_0.py\)"),
        ("rank_0.py", garbage, r"cannot load .*rank_0.py \(.*; edited since the export: rank_0.py"),
        (
            "weights/stage_0.safetensors",
            removed,
            r"cannot read .*stage_0.safetensors \(No such fil",
        ),
        ("weights/stage_0.safetensors", cut, r"stage_0.safetensors is no safetensors file, or cut"),
        (
            "weights/stage_0.safetensors",
            one_bit,
            r"stage_0.safetensors is not as it was exported: ",
        ),
        ("SHA256SUMS", removed, r"cannot read .*SHA256SUMS \(No such file or directory\): remove"),
        ("SHA256SUMS", garbage, r"SHA256SUMS is damaged: remove the folder, and copy or export it"),
        ("SHA256SUMS", null_in_a_name, r"SHA256SUMS is damaged: remove the folder"),
        ("SHA256SUMS", pipe, r"SHA256SUMS is a named pipe"),
        ("stage_0.py", pipe, r"stage_0.py is a named pipe"),
        ("weights/stage_0.safetensors", pipe, r"stage_0.safetensors is a named pipe"),
        ("plan.json", garbage, r"plan.json is no text \("),
    ],
)
def test_a_folder_with_a_damaged_file_is_refused(
    program: pc.Program, tmp_path: Path, name: str, damage: Callable[[Path], None], text: str
) -> None:
    folder = program.export(tmp_path / "out")
    damage(folder / name)
    with pytest.raises(pc.InputError, match=text):
        pc.load(folder).worker()


def test_the_instructions_of_a_damaged_script_are_refused(
    program: pc.Program, tmp_path: Path
) -> None:
    folder = program.export(tmp_path / "out")
    for damage in (garbage, cut):
        damage(folder / "rank_0.py")
        with pytest.raises(pc.InputError, match=r"cannot load .*rank_0.py"):
            pc.load(folder).instructions(0)


def test_an_edited_script_is_run_and_said_to_be_edited(program: pc.Program, tmp_path: Path) -> None:
    folder = program.export(tmp_path / "out")
    script = folder / "stage_0.py"
    script.write_text(f"{script.read_text()}\n# mine\n")
    with pytest.warns(UserWarning, match="edited since the export: stage_0.py"):
        worker = pc.load(folder).worker()
    with worker:
        assert worker.step(batch(MICROBATCHES)).isfinite()
