"""A job as SLURM runs it: a rank is killed, the time is over; it goes on, and is queued again."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import parcompiler as pc
from parcompiler.models import gpt
from parcompiler.runtime.checkpoint import folder as folders
from tests.codegen.test_launchers import stubs
from tests.distributed.forked import children

PATIENCE = 120  # s


def awaited(what: Callable[[], object], job: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until something is so."""
    end = time.monotonic() + PATIENCE
    while not what():
        assert job.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)


def test_a_job_goes_on_after_a_kill_and_is_queued_again_when_its_time_is_over(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    config = gpt.Config(layers=2, heads=2, hidden=8, vocabulary=16, sequence=4, dropout=0.1)
    tokens = torch.zeros(2, 4, dtype=torch.long)
    program = pc.compile(
        gpt.GPT(config), pc.Mesh(pipeline=2), (tokens, tokens), microbatches=2, progress=False
    )
    out = program.export(tmp_path / "out", launcher="slurm")
    calls, log = tmp_path / "calls", tmp_path / "log"
    commands = {
        "scontrol": f'echo "$@" >> {calls}; echo localhost',
        "srun": f'echo $$ > {tmp_path / "step"}; shift; exec "$@"',
        "scancel": f'kill -TERM "$(cat {tmp_path / "step"})"',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "localhost"}
    environment = {
        **os.environ, **job, "SLURM_SUBMIT_DIR": str(out), "PYTHONWARNINGS": "ignore",
        "PATH": f"{stubs(tmp_path, commands)}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    command = ["bash", str(out / "submit.sbatch"), "--steps", "1000000", "--every", "5"]
    with log.open("wb") as file:
        script = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    saved = out / "checkpoints"
    try:
        awaited(lambda: len(folders.complete(saved)) > 1, script, log)
        (step,) = children(script.pid)
        os.kill(children(step)[1], signal.SIGKILL)
        awaited(lambda: "going on from step" in log.read_text(), script, log)
        said = re.search(r"going on from step (\d+) of (.*)", log.read_text())
        assert said is not None
        newest = int(said[1])
        assert said[2].endswith(f"step_{newest:08d}")
        # By its name: the job may remove it before its files are read.
        awaited(lambda: folders.find(saved).name > f"step_{newest:08d}-", script, log)
        script.send_signal(signal.SIGUSR1)
        assert script.wait(PATIENCE) != 0
    finally:
        script.terminate()
        for pid in children(script.pid) if script.poll() is None else ():
            os.kill(pid, signal.SIGTERM)
    assert f"requeue {os.getpid()}" in calls.read_text().splitlines()
    text = log.read_text()
    ended = re.search(r"told to end: saved after step (\d+)", text)
    assert ended is not None, text
    assert folders.read(folders.find(saved)).step == int(ended[1])
    assert folders.damaged(folders.find(saved)) == []
    assert len(folders.complete(saved)) == 3
    losses: dict[str, str] = {}
    # Anywhere in a line: other processes write into the same file.
    steps = re.findall(r"step (\d+) loss (\d+\.\d{8})", text)
    for number, loss in steps:  # some twice, unless the kill came right behind a checkpoint
        assert losses.setdefault(number, loss) == loss
    assert [int(number) for number in losses] == [*range(1, int(ended[1]) + 1)], text
