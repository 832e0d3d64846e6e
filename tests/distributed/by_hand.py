"""Ranks that are started by hand: no agent ends those that are left when one dies."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import parcompiler as pc
from tests.distributed.forked import start
from tests.runtime.drawn import drawn_batch

PATIENCE = 120.0  # s for anything


class Ranks:
    """The processes of a program's ranks, which print into `folder`."""

    def __init__(self, folder: Path, size: int, program: Path, *arguments: str) -> None:
        self.folder = folder
        self.processes = start(size, folder, main, str(program), *arguments)

    def says(self, rank: int) -> list[str]:
        """What a rank has printed."""
        path = self.folder / f"log_{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def ready(self) -> None:
        """Wait until all ranks train."""
        end = time.monotonic() + PATIENCE
        for rank in range(len(self.processes)):
            while "ready" not in self.says(rank):
                assert time.monotonic() < end, "a rank does not start"
                assert self.processes[rank].exitcode is None, self.says(rank)
                time.sleep(0.02)

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank."""
        os.kill(self.processes[rank].pid or 0, number)

    def ends(self, dead: int | None = None) -> tuple[dict[int, str], float]:
        """What the other ranks raise, and in how many seconds the last of them has.

        That they end then is awaited, but not measured: it takes seconds of a busy machine.
        """
        start, times, said = time.monotonic(), [], {}
        for rank, process in enumerate(self.processes):
            if rank != dead:
                process.join(PATIENCE)
                lines = self.says(rank)
                last = next((line for line in lines if line.startswith("ended ")), "ended 0 ")
                _, at, said[rank] = last.split(" ", 2)
                times.append(float(at))
                assert process.exitcode == 1, lines
        return said, max(times) - start


@contextmanager
def started(program: Path, size: int, *arguments: str) -> Iterator[Ranks]:
    """Ranks that are ended with the block."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(Path(folder), size, program, *arguments)
        try:
            yield ranks
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()


def train(worker: pc.Worker, way: str) -> None:
    """Train, and after some steps do what others do not."""
    program = worker.program
    generator = torch.Generator().manual_seed(program.coordinate.data)
    worker.set_optimizer(torch.optim.SGD, lr=0.1)
    batches = [drawn_batch(program, generator) for _ in range(2)]
    for batch in batches:
        worker.train_step(batch)
    print("ready", flush=True)
    if way == "an evaluation on rank 0" and worker.rank == 0:
        worker.evaluate(batches[0])
    if way == "gather on rank 0" and worker.rank == 0:
        worker.gather_state_dict()
    if way == "an error in the script of rank 1" and worker.rank == 1:
        message = "no such file"
        raise OSError(message)
    if way == "a loader that sleeps on rank 1" and worker.rank == 1:
        asleep()
    if way == "a module that sleeps on rank 1" and worker.rank == 1:
        worker.stages[1].register_forward_pre_hook(asleep)
    while True:
        for batch in batches:
            worker.train_step(batch)


def asleep(*_: object) -> None:
    time.sleep(PATIENCE)


def main(folder: str, way: str = "", timeout: str = "600", flight: str = "") -> None:
    try:
        worker = pc.load(folder).worker(timeout=float(timeout))
        worker.flight.folder = Path(flight) if flight else None
        train(worker, way)
    except pc.LaunchError as error:
        print(f"ended {time.monotonic()} {error}", flush=True)
        sys.exit(1)
