"""Ranks that are started by hand: no agent ends those that are left when one dies.

As a script it is a rank: it trains until something stops it, in the way that it is told.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import parcompiler as pc
from parcompiler.runtime.script import random_batch

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0  # s for anything


class Ranks:
    """The processes of a program's ranks."""

    def __init__(self, folder: Path, size: int, *arguments: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        given = {
            **{name: text for name, text in os.environ.items() if "TORCHELASTIC" not in name},
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size),
            "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT),
            "TORCH_CPP_LOG_LEVEL": "FATAL",
        }  # fmt: skip
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, str(folder), *arguments],
                env={**given, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]

    def ready(self) -> None:
        """Wait until all ranks train."""
        for process in self.processes:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], PATIENCE)[0], "a rank does not start"
            line = process.stdout.readline()
            assert line == "ready\n", line + process.stdout.read()

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank."""
        self.processes[rank].send_signal(number)

    def ends(self, dead: int | None = None) -> tuple[dict[int, str], float]:
        """What the other ranks raise, and in how many seconds the last of them has.

        That they end then is awaited, but not measured: it takes seconds of a busy machine.
        """
        start, times, said = time.monotonic(), [], {}
        for rank, process in enumerate(self.processes):
            if rank != dead:
                lines = process.communicate(timeout=PATIENCE)[0].strip().splitlines()
                last = next((line for line in lines if line.startswith("ended ")), "ended 0 ")
                _, at, said[rank] = last.split(" ", 2)
                times.append(float(at))
                assert process.returncode == 1, lines
        return said, max(times) - start


@contextmanager
def started(folder: Path, size: int, *arguments: str) -> Iterator[Ranks]:
    """Ranks that are ended with the block."""
    ranks = Ranks(folder, size, *arguments)
    try:
        yield ranks
    finally:
        for process in ranks.processes:
            process.kill()
            process.communicate()


def train(worker: pc.Worker, way: str) -> None:
    """Train, and after some steps do what others do not."""
    program = worker.program
    generator = torch.Generator().manual_seed(program.coordinate.data)
    worker.set_optimizer(torch.optim.SGD, lr=0.1)
    batches = [random_batch(program, generator) for _ in range(2)]
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
    if way == "nothing on rank 1" and worker.rank == 1:
        time.sleep(PATIENCE)
    while True:
        for batch in batches:
            worker.train_step(batch)


def main(folder: str, way: str = "", timeout: str = "600") -> None:
    torch.set_num_threads(1)
    try:
        train(pc.load(folder).worker(timeout=float(timeout)), way)
    except pc.LaunchError as error:
        print(f"ended {time.monotonic()} {error}", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
