"""The processes behind verify(): whatever befalls one of them is told, and the next proof works."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch

import parcompiler as pc
from parcompiler.verification import pool as pools
from parcompiler.verification.pool import Job, Outcome, Pool
from tests.distributed.forked import children
from tests.runtime.workers import batch, compiled, mixed, one_process

MICROBATCHES = 2


@pytest.fixture(scope="module")
def program() -> pc.Program:
    return compiled(mixed(), MICROBATCHES, mesh=pc.Mesh(pipeline=2))


@pytest.fixture(scope="module")
def folder(program: pc.Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program.export(tmp_path_factory.mktemp("a place with spaces") / "my program, v2")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """A pool of two processes that have worked already."""
    made = Pool()
    yield made
    made.close()


def run(pool: Pool, folder: Path, patience: float = 120.0) -> Outcome:
    return pool.run(Job(str(folder), [batch(MICROBATCHES)], patience=patience), 2)


def works(pool: Pool, folder: Path, program: pc.Program) -> None:
    model = mixed()
    wanted = one_process(model, batch(MICROBATCHES), MICROBATCHES)
    found = run(pool, folder)
    assert torch.allclose(found.loss, wanted, rtol=1e-6)
    gradients = {n for n, p in model.named_parameters() if p.grad is not None}
    assert found.gradients.keys() == gradients


def spoiled(program: pc.Program, path: Path, line: str) -> Path:
    """An export whose rank 1 begins with a line of its own."""
    folder = program.export(path / "out")
    script = folder / "rank_1.py"
    script.write_text(f"import os, time\n{line}\n{script.read_text()}")
    return folder


def test_a_folder_may_have_spaces_in_its_path_and_processes_are_kept(
    pool: Pool, folder: Path, program: pc.Program
) -> None:
    works(pool, folder, program)
    first = list(pool._processes)
    works(pool, folder, program)
    assert pool._processes == first


def test_several_programs_run_in_turn(pool: Pool, folder: Path, program: pc.Program) -> None:
    other = compiled(mixed(), 1)
    for _ in range(2):
        works(pool, folder, program)
        assert other.verify().ok
        assert program.verify().ok


def test_a_process_that_died_between_proofs_is_replaced(
    pool: Pool, folder: Path, program: pc.Program
) -> None:
    works(pool, folder, program)
    process = pool._processes[1]
    os.kill(children(process.parent.pid)[1], signal.SIGKILL)
    assert wait([process.answers.fileno()], 60)
    works(pool, folder, program)


@pytest.mark.parametrize(
    ("line", "patience", "message"),
    [
        ("os._exit(3)", 60.0, r"the process of rank 1 died \(exit code 3\)"),
        ("1 / 0", 60.0, "ZeroDivisionError: division by zero"),
        ("time.sleep(100)", 2.0, r"rank 0, 1 did not answer within 2 s"),
    ],
)
def test_a_process_that_fails_is_reported_within_seconds(
    pool: Pool,
    folder: Path,
    program: pc.Program,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    patience: float,
    message: str,
) -> None:
    monkeypatch.setattr(pools, "GRACE", 1.0)
    works(pool, folder, program)
    begin = time.monotonic()
    with pytest.raises(pc.LaunchError, match=message):
        run(pool, spoiled(program, tmp_path, line), patience)
    assert time.monotonic() - begin < 30
    assert not pool._processes  # so that the next one starts afresh


KILLED = """
import json, os, signal, sys
from parcompiler.verification.pool import Pool
pool = Pool()
pool.start(1)
job = {"rank": 0, "size": 2, "device": "cpu", "store": sys.argv[1]}  # rank 1 never comes
pool._processes[0].jobs.write(json.dumps(job).encode() + b"\\n")
pool._processes[0].jobs.flush()
print(pool._processes[0].parent.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_that_wait_end_with_a_process_that_was_killed(tmp_path: Path) -> None:
    line = [sys.executable, "-c", KILLED, str(tmp_path / "store")]
    owner = subprocess.run(line, stdout=subprocess.PIPE, check=False)
    group, end = int(owner.stdout), time.monotonic() + 30
    while running(group) and time.monotonic() < end:
        time.sleep(0.1)
    assert not running(group)


def running(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ends meanwhile
            state, _, of, *_ = path.read_text().rpartition(")")[2].split()
            found += [int(path.parent.name)] if state != "Z" and int(of) == group else []
    return found


def test_an_interruption_passes_through_and_the_next_proof_works(
    pool: Pool, folder: Path, program: pc.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("parcompiler.verification.pool.wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(pool, folder)
    assert not pool._processes
    works(pool, folder, program)


def test_a_proof_works_in_a_process_that_torchrun_started(
    folder: Path, program: pc.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "PARCOMPILER_DEVICE": "cuda",
    }.items():
        monkeypatch.setenv(name, value)
    pool = Pool()
    try:
        works(pool, folder, program)
    finally:
        pool.close()


def test_a_fork_has_a_pool_of_its_own_and_leaves_that_of_its_parent_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = pools.pool()
    assert pools.pool() is mine
    processes = list(mine._processes)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)
        assert pools.pool() is not mine
    assert mine._processes == processes
    assert all(process.parent.poll() is None for process in processes)
