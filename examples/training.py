"""What the examples share: start the ranks, train, and compare measured with predicted time."""

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import parcompiler as pc


def launch(script: str, ranks: int, *arguments: str) -> None:
    """Start `script` again as `ranks` processes on this machine."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    subprocess.run([*torchrun, script, *arguments], check=True)


def train(
    folder: Path, batches: Iterator[object], steps: int, tokens_per_step: int, lr: float
) -> None:
    """Train this process's rank of the program in `folder`; rank 0 shows how it goes."""
    torch.set_num_threads(1)
    program = pc.load(folder)
    with program.worker() as worker:
        worker.set_optimizer(torch.optim.AdamW, lr=lr)
        losses, seconds = [], []
        with _progress(worker.rank == 0) as bar:
            task = bar.add_task("training", total=steps, loss=0.0, speed=0.0)
            for batch in itertools.islice(batches, steps):
                start = time.perf_counter()
                losses.append(worker.train_step(batch).item())
                seconds.append(time.perf_counter() - start)
                speed = tokens_per_step / seconds[-1]
                bar.update(task, advance=1, loss=losses[-1], speed=speed)
    if worker.rank == 0:
        print(f"loss {losses[0]:.3f} -> {statistics.mean(losses[-5:]):.3f} in {steps} steps")
        print(program.report().measured(statistics.median(seconds)))


def _progress(visible: bool) -> Progress:
    """A bar on standard error with the loss and tokens per second."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}  loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[speed]:.0f} tokens/s"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not visible,
    )
