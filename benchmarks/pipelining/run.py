"""What does a step cost here, beside torch.distributed.pipelining with the same stages and order?

    python benchmarks/pipelining/run.py [--ranks 2 4] [--schedules 1f1b ...] [--pairs 40]

Every row starts its own processes on this machine, one thread each. Both runtimes live in them and
take turns, step by step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from rank import main as rank_main

import parcompiler as pc
from parcompiler.models import gpt
from parcompiler.schedules import build

MICROBATCHES = 8
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
MODELS = {  # hidden, sequence, layers
    "small": (32, 16, 8),
    "medium": (128, 64, 8),
    "large": (256, 128, 8),
}
TOLERANCE = 1e-5  # float32, other orders of addition


@dataclass(frozen=True, slots=True)
class Row:
    """What a row of the table says; costs are sums over ranks, in milliseconds."""

    processor: tuple[float, float]
    processor_ratio: tuple[float, float, float]
    wall: tuple[float, float]
    wall_ratio: float
    buffers: list[tuple[int, int]]
    error: float


def main() -> None:
    """Print the table."""
    options = _options()
    print(
        "| model | ranks | schedule | CPU ours (ms) | CPU theirs (ms) | CPU ratio (quartiles) | "
        "wall ratio | buffers ours / theirs, by rank (KiB) | largest difference |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for model in options.models:
        for size in options.ranks:
            for schedule in options.schedules:
                row = _row(model, size, schedule, options.pairs)
                print(f"| {model} | {size} | {schedule} | {_cells(row)} |", flush=True)


def _options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, choices=(2, 4), default=[2, 4])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--pairs", type=int, default=40, help="pairs of steps in each row (40)")
    options = parser.parse_args()
    if options.pairs < 1:
        parser.error(f"--pairs must be at least 1 ({options.pairs} given)")
    return options


def _row(model: str, size: int, schedule: str, pairs: int) -> Row:
    """Export the program, run its processes, and gather what they found."""
    with tempfile.TemporaryDirectory() as folder:
        _export(Path(folder), model, size, schedule)
        multiprocessing.spawn(rank_main, (size, folder, schedule, pairs), nprocs=size)
        found = [
            json.loads((Path(folder) / f"rank_{rank}.json").read_text(encoding="utf-8"))
            for rank in range(size)
        ]
    row = _summary(found)
    if row.error > TOLERANCE:
        sys.exit(f"the two disagree by {row.error:.1e} ({model}, {size} ranks, {schedule})")
    return row


def _export(folder: Path, model: str, size: int, schedule: str) -> None:
    """The program of all ranks, its order as a CSV, and a batch."""
    hidden, sequence, layers = MODELS[model]
    torch.manual_seed(0)
    config = gpt.Config(
        layers=layers, heads=4, hidden=hidden, vocabulary=512, sequence=sequence, tied=False
    )
    tokens = torch.randint(config.vocabulary, (MICROBATCHES, sequence + 1))
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    program = pc.compile(
        gpt.GPT(config),
        pc.Mesh(pipeline=size, device="cpu"),
        {name: tensor[:1] for name, tensor in batch.items()},
        schedule=schedule,
        microbatches=MICROBATCHES,
        recompute="none",
        progress=False,
    )
    program.export(folder / "program")
    torch.save(batch, folder / "batch.pt")
    virtual = 2 if schedule == "interleaved" else 1
    order = build(schedule, size, MICROBATCHES, virtual)
    order.to_csv(folder / "orders.csv")


def _summary(found: list[dict[str, Any]]) -> Row:
    """Sums over ranks of each pair, then medians."""
    steps = list(zip(*(rank["pairs"] for rank in found), strict=True))
    processor = [
        tuple(1e3 * sum(rank[side]["processor"] for rank in ranks) for side in (0, 1))
        for ranks in steps
    ]
    wall = [
        tuple(1e3 * max(rank[side]["wall"] for rank in ranks) for side in (0, 1)) for ranks in steps
    ]
    ratios = [ours / theirs for ours, theirs in processor]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Row(
        processor=_medians(processor),
        processor_ratio=(low, middle, high),
        wall=_medians(wall),
        wall_ratio=statistics.median(ours / theirs for ours, theirs in wall),
        buffers=[tuple(rank["buffers"]) for rank in found],
        error=max(max(rank["loss_error"], rank["gradient_error"]) for rank in found),
    )


def _medians(pairs: list[Any]) -> tuple[float, float]:
    """Of both sides."""
    ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    return ours, theirs


def _cells(row: Row) -> str:
    """The numbers of a row."""
    low, middle, high = row.processor_ratio
    buffers = ", ".join(f"{ours / 1024:.0f} / {theirs / 1024:.0f}" for ours, theirs in row.buffers)
    return (
        f"{row.processor[0]:.1f} | {row.processor[1]:.1f} | {middle:.2f} ({low:.2f}–{high:.2f}) | "
        f"{row.wall_ratio:.2f} | {buffers} | {row.error:.0e}"
    )


if __name__ == "__main__":
    main()
