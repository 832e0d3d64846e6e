"""Plays jobs, each on the first of its ranks: trains, saves, loads, and writes down what it saw.

The folder has `jobs.json` and the programs; every job gets `NAME.json` and the checkpoints that it
saves.
"""

import io
import json
import os
import signal
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import parcompiler as pc
from parcompiler.runtime import run, tensor_files
from parcompiler.runtime.boxes import Box
from parcompiler.runtime.checkpoint import pretrained

TIMEOUT = timedelta(minutes=3)


COPIED: list[int] = []  # bytes of each box that was copied out of a file


class CountingFile(tensor_files.File):
    """A file whose reads are counted."""

    def read(self, name: str, box: Box, target: torch.Tensor) -> None:
        COPIED.append(box.count * self.dtype(name).itemsize)
        super().read(name, box, target)


class Loader:
    """A position in the data, which each data rank has for itself."""

    def __init__(self, rank: int) -> None:
        self.rank, self.taken = rank, 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "taken": self.taken,
            "order": torch.arange(3) + self.rank,
            "place": (self.rank, None),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["order"].tolist() == [self.rank, self.rank + 1, self.rank + 2]
        assert state["place"] == (self.rank, None)
        self.taken = state["taken"]


class Player:
    """One job on one rank."""

    def __init__(self, folder: Path, job: dict[str, Any], worker: pc.Worker) -> None:
        self.folder, self.job, self.worker = folder, job, worker
        self.losses: list[float] = []
        self.faults: list[str] = []
        self.read = 0.0
        kind = getattr(torch.optim, job.get("optimizer", "AdamW"))
        self.optimizer = worker.set_optimizer(kind, lr=1e-2)
        if "scale" in job:
            worker.loss_scale = job["scale"]
        self.loader = Loader(worker.data_rank)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(
            self.optimizer, job.get("gamma", 0.9)
        )
        self.extra = {"loader": self.loader, "scheduler": self.scheduler}

    def batch(self, seed: int) -> dict[str, torch.Tensor]:
        """The rows of this data rank: those of all are the same however many there are."""
        high, length = self.job["high"], self.job["length"]
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randint(high, (self.job["rows"], length), generator=generator)
        own = whole.chunk(self.worker.data_ranks)[self.worker.data_rank]
        return {item.key: own for item in self.worker.program.inputs.values()}

    def play(self, action: str, *arguments: Any) -> None:
        try:
            getattr(self, f"do_{action}")(*arguments)
        except pc.ParcompilerError as error:
            self.faults.append(f"{type(error).__name__}: {error}")

    def do_train(self, steps: int) -> None:
        for _ in range(steps):
            batch = self.batch(self.worker.step_count)
            self.losses.append(float(self.worker.train_step(batch)))
            self.loader.taken += 1
            self.scheduler.step()

    def do_save(self, name: str, options: dict[str, Any] | None = None) -> None:
        self.worker.save(self.folder / name, self.extra, **(options or {}))

    def do_save_nowhere(self, rank: int) -> None:
        """Give no path on one rank."""
        folder: Any = None if self.worker.rank == rank else self.folder / "h"
        self.worker.save(folder)

    def do_load(self, name: str) -> None:
        extra = dict(self.extra)
        if self.job.get("no_loader"):
            del extra["loader"]
        step = self.worker.load(self.folder / name, extra)
        if step != self.worker.step_count or ("loader" in extra and self.loader.taken != step):
            self.faults.append(f"step {step}, {self.loader.taken} batches taken")

    def do_damage(self, pattern: str) -> None:
        """Change a byte of a file, on rank 0."""
        if self.worker.rank == 0:
            (path,) = sorted(self.folder.glob(pattern))[:1]
            raw = bytearray(path.read_bytes())
            raw[-1] ^= 1
            path.write_bytes(raw)

    def do_fill_disk(self, rank: int) -> None:
        """From now on, no tensors can be written on a rank."""
        if self.worker.rank == rank:

            def full(*_: object, **__: object) -> str:
                raise OSError(28, "No space left on device")

            sys.modules["parcompiler.runtime.checkpoint.saving"].write = full  # type: ignore[attr-defined]

    def do_empty_disk(self) -> None:
        sys.modules["parcompiler.runtime.checkpoint.saving"].write = tensor_files.write  # type: ignore[attr-defined]

    def do_pretrained(self, name: str) -> None:
        COPIED.clear()
        keys = self.worker.load_pretrained(self.folder / name)
        self.faults += [*keys.missing_keys, *keys.unexpected_keys]
        self.do_count()

    def do_count(self) -> None:
        """The bytes that the last loading has read, by those that this rank holds."""
        layout, interpreter = self.worker._checkpoints._layout, self.worker._interpreter
        held = sum(
            part.box.count
            for name, tensor in interpreter.tensors.items()
            if name not in self.worker.program.unsaved
            for part in layout.parts(name, tensor, tensor)
        )
        self.read = sum(COPIED) / (held * self.job["itemsize"])

    def do_publish(self, name: str, config: dict[str, Any]) -> None:
        self.worker.save_pretrained(self.folder / name, config, max_shard_size=20_000)

    def do_gather(self, name: str) -> None:
        """The whole model in one file, on rank 0."""
        state = self.worker.gather_state_dict()
        if state is not None:
            save_file({key: tensor.clone() for key, tensor in state.items()}, self.folder / name)

    def do_evaluate(self, seed: int) -> None:
        self.losses.append(float(self.worker.evaluate(self.batch(seed))))


def play(folder: Path, job: dict[str, Any], rank: int) -> None:
    if "command" in job:
        if rank == 0:
            command(folder, job)
        return
    size = job["ranks"]
    if rank >= size:
        return
    store = dist.FileStore(str(folder / f"{job['name']}.store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    os.environ |= {"WORLD_SIZE": str(size)}
    torch.manual_seed(job.get("seed", 0))
    result: dict[str, Any] = {"losses": [], "faults": [], "read": 0}
    try:
        if "script" in job:
            result["code"] = script(folder, job, rank)
            return
        COPIED.clear()
        counting = mock.patch.object(pretrained, "File", CountingFile)
        with counting, pc.load(folder / job["program"]).worker() as worker:
            player = Player(folder, job, worker)
            for action, *arguments in job["actions"]:
                player.play(action, *arguments)
            result |= {"losses": player.losses, "faults": player.faults}
            result["read"] = player.read
    except Exception as error:
        result["faults"].append(f"{type(error).__name__}: {error}")
    finally:
        dist.destroy_process_group()
        (folder / f"{job['name']}.{rank}.json").write_text(json.dumps(result))


def command(folder: Path, job: dict[str, Any]) -> None:
    """Call parcompiler in the folder, while the other ranks wait for the next job."""
    from parcompiler.cli import run as parcompiler

    errors, output = io.StringIO(), io.StringIO()
    with chdir(folder), redirect_stderr(errors), redirect_stdout(output):
        code = parcompiler(job["command"])
    result = {"code": code, "output": output.getvalue(), "errors": errors.getvalue()}
    (folder / f"{job['name']}.0.json").write_text(json.dumps(result))


def script(folder: Path, job: dict[str, Any], rank: int) -> int:
    """The exit code of an emitted script; SIGTERM comes to one rank in its second step."""

    def make(timeout: float) -> pc.Worker:
        worker = pc.load(folder / job["program"]).worker(timeout=timeout)
        step = worker.train_step

        def terminated(batch: object) -> torch.Tensor:
            if rank == job.get("terminated") and worker.step_count == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(batch)

        worker.train_step = terminated  # type: ignore[method-assign]
        return worker

    try:
        run(make, ["--save", str(folder / job["script"]), *job["arguments"]])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def main(folder: str) -> None:
    rank = int(os.environ["RANK"])
    for job in json.loads(Path(folder, "jobs.json").read_text()):
        play(Path(folder), job, rank)
