"""What does a step cost here, beside torch.distributed.pipelining with the same stages and order?

    python benchmarks/pipelining/run.py [--models small ...] [--ranks 2 4] [--rounds 3] [--pairs 20]

Every row starts its own processes on this machine, one thread each, `rounds` times. Both runtimes
live in them and take turns, step by step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
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
    main_ratio: float
    wall_ratio: float
    buffers: list[tuple[int, int]]
    error: float


def main() -> None:
    """Print the table."""
    options = _options()
    print(
        "| model | ranks | schedule | CPU ours (ms) | CPU theirs (ms) | CPU ratio (quartiles) | "
        "of main threads | wall ratio | buffers ours / theirs, by rank (KiB) | largest difference |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for model in options.models:
        for size in options.ranks:
            for schedule in options.schedules:
                row = _row(model, size, schedule, options.rounds, options.pairs)
                print(f"| {model} | {size} | {schedule} | {_cells(row)} |", flush=True)


def _options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, choices=(2, 4), default=[2, 4])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--rounds", type=int, default=3, help="starts of processes for a row (3)")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of steps in each round (20)")
    options = parser.parse_args()
    if min(options.pairs, options.rounds) < 1:
        parser.error(f"--rounds and --pairs must be at least 1 ({options.rounds}, {options.pairs})")
    return options


def _row(model: str, size: int, schedule: str, rounds: int, pairs: int) -> Row:
    """Export the program, run its processes, and gather what they found."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _export(folder, model, size, schedule)
        row = _summary([_round(folder, size, schedule, pairs) for _ in range(rounds)])
    if row.error > TOLERANCE:
        sys.exit(f"the two disagree by {row.error:.1e} ({model}, {size} ranks, {schedule})")
    return row


def _round(folder: Path, size: int, schedule: str, pairs: int) -> list[dict[str, Any]]:
    """What each rank found."""
    (folder / "store").unlink(missing_ok=True)
    multiprocessing.spawn(rank_main, (size, str(folder), schedule, pairs), nprocs=size)
    texts = [(folder / f"rank_{rank}.json").read_text(encoding="utf-8") for rank in range(size)]
    return [json.loads(text) for text in texts]


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


def _summary(rounds: list[list[dict[str, Any]]]) -> Row:
    """Sums over ranks of each pair (the slowest, of wall time), then medians over all pairs."""
    steps = [pair for ranks in rounds for pair in zip(*(r["pairs"] for r in ranks), strict=True)]
    processor = [_both(sum, ranks, "processor") for ranks in steps]
    main = [_both(sum, ranks, "main") for ranks in steps]
    wall = [_both(max, ranks, "wall") for ranks in steps]
    ratios = [ours / theirs for ours, theirs in processor]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    ranks = [rank for ranks in rounds for rank in ranks]
    return Row(
        processor=_medians(processor),
        processor_ratio=(low, middle, high),
        main_ratio=statistics.median(ours / theirs for ours, theirs in main),
        wall_ratio=statistics.median(ours / theirs for ours, theirs in wall),
        buffers=[tuple(rank["buffers"]) for rank in rounds[0]],
        error=max(max(rank["loss_error"], rank["gradient_error"]) for rank in ranks),
    )


def _both(
    over: Callable[[Iterable[float]], float], ranks: Iterable[Any], key: str
) -> tuple[float, float]:
    """One pair of steps: a cost of ours and of theirs, in milliseconds, over the ranks."""
    ours, theirs = zip(*ranks, strict=True)
    return 1e3 * over(cost[key] for cost in ours), 1e3 * over(cost[key] for cost in theirs)


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
        f"{row.main_ratio:.2f} | {row.wall_ratio:.2f} | {buffers} | {row.error:.0e}"
    )


if __name__ == "__main__":
    main()
