"""What does a step cost with the vocabulary on all ranks, beside the best division with it whole?

    python benchmarks/vocabulary/run.py [--vocabularies 65536 131072] [--ranks 2] [--rounds 7]

For each vocabulary the same processes, one thread each, hold a worker for every method and one
ordinary model, which take steps in turn. "balance" is the time of the ordinary model's step divided
by the ranks, with the bubble of 1F1B: (m + p - 1) / m times as long.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from rank import ALONE
from rank import main as rank_main

import parcompiler as pc
from parcompiler.models import gpt

MICROBATCHES, ROWS, SEQUENCE = 8, 2, 256
METHODS = ("whole", "naive", "vocab-1", "vocab-2", "interlaced")
TOLERANCE = 1e-4  # float32 losses, other orders of addition


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[65536, 131072])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=7, help="steps of each method")
    options = parser.parse_args()
    names = "vocabulary", "method", "wall (s)", "CPU (s)", "wall, of whole", "CPU, of whole"
    names += "wall, of balance", "CPU, of one process", "parameters, largest rank over mean"
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for size in options.vocabularies:
        for row in _rows(options, size):
            print(f"| {size} | {row} |", flush=True)


def _rows(options: argparse.Namespace, size: int) -> list[str]:
    """Export the programs, run the processes, and say what they found."""
    methods = list(dict.fromkeys(["whole", *options.methods]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _export(folder, options, size, methods)
        arguments = (options.ranks, name, methods, options.rounds)
        multiprocessing.spawn(rank_main, arguments, nprocs=options.ranks)
        found = [json.loads((folder / f"rank_{r}.json").read_text()) for r in range(options.ranks)]
    return _summary(found, methods, options.ranks)


def _export(folder: Path, options: argparse.Namespace, size: int, methods: list[str]) -> None:
    """A program for every method, the model's configuration, and a batch."""
    config = gpt.Config(
        layers=options.layers, heads=4, hidden=options.hidden, vocabulary=size, sequence=SEQUENCE,
        tied=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = gpt.GPT(config)
    tokens = torch.randint(size, (MICROBATCHES * ROWS, SEQUENCE + 1))
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    torch.save(batch, folder / "batch.pt")
    torch.save((config, MICROBATCHES), folder / "model.pt")
    for method in methods:
        program = pc.compile(
            model,
            pc.Mesh(pipeline=options.ranks, device="cpu"),
            {key: tensor[:ROWS] for key, tensor in batch.items()},
            schedule="1f1b",
            vocabulary=method,
            microbatches=MICROBATCHES,
            recompute="none",
            progress=False,
        )
        program.export(folder / method)


def _summary(found: list[Any], methods: list[str], ranks: int) -> list[str]:
    """Medians over the rounds of the slowest rank (wall) and of the sum over ranks (CPU)."""
    loss = found[0]["losses"][ALONE]
    wall = {name: _over(found, name, "wall", max) for name in (*methods, ALONE)}
    processor = {name: _over(found, name, "processor", sum) for name in (*methods, ALONE)}
    bubble = (MICROBATCHES + ranks - 1) / MICROBATCHES
    balance = [seconds / ranks * bubble for seconds in wall[ALONE]]
    rows = [f"{ALONE} | {_median(wall[ALONE])} | {_median(processor[ALONE])} |  |  |  |  | "]
    for name in methods:
        assert abs(found[0]["losses"][name] - loss) < TOLERANCE * loss, (name, loss)
        sizes = [rank["parameters"][name] for rank in found]
        cells = [
            name,
            _median(wall[name]),
            _median(processor[name]),
            _ratio(wall[name], wall["whole"]),
            _ratio(processor[name], processor["whole"]),
            _ratio(wall[name], balance),
            _ratio(processor[name], processor[ALONE]),
            f"{max(sizes) / statistics.mean(sizes):.3f}",
        ]
        rows.append(" | ".join(cells))
    return rows


def _over(found: list[Any], name: str, key: str, combine: Any) -> list[float]:
    """A cost of each round, over the ranks."""
    rounds = zip(*(rank["costs"][name] for rank in found), strict=True)
    return [combine(cost[key] for cost in costs) for costs in rounds]


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):.2f}"


def _ratio(values: list[float], others: list[float]) -> str:
    """The median of the ratios of each round."""
    return f"{statistics.median(a / b for a, b in zip(values, others, strict=True)):.3f}"


if __name__ == "__main__":
    main()
