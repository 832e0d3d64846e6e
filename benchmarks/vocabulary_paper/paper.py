"""The published measurements of 2411.05288 on eight GPUs, and the programs that they are of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import parcompiler as pc
from parcompiler.models import gpt

LAYERS, HEADS, HIDDEN, FFN = 32, 24, 3072, 4 * 3072
RANKS, MICROBATCHES, PEAK = 8, 128, 320e12  # the peak is that of the published definition
# By the name of a method: the options `vocabulary` and `stages`.
METHODS = {
    "Baseline": ("whole", "even"),
    "Redis": ("whole", "auto"),
    "Vocab-1": ("vocab-1", "even"),
    "Vocab-2": ("vocab-2", "even"),
    "Interlaced": ("interlaced", "even"),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One published measurement: `mfu` in percent, `memory` of the fullest rank in GiB."""

    method: str
    sequence: int
    thousands: int  # of words
    mfu: float
    memory: float

    @property
    def words(self) -> int:
        """The size of the vocabulary."""
        return 1000 * self.thousands


def published() -> Iterator[Cell]:
    """All cells of the table, by sequence, vocabulary and method."""
    path = Path(__file__).with_name("published.json")
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    for sequence in sorted({row["seq"] for row in rows}):
        own = [row for row in rows if row["seq"] == sequence]
        for size in own[0]["mfu_pct"]:
            for row in own:
                mfu, memory = row["mfu_pct"][size], row["peak_mem_gb"][size]
                yield Cell(row["method"], sequence, int(size.removesuffix("k")), mfu, memory)


def program(cell: Cell, like: pc.Program | None = None) -> pc.Program:
    """The program of a cell; `like` is another one of the same model, which is not captured again.

    16-bit weights with float32 masters and Adam; nothing is recomputed.
    """
    vocabulary, stages = METHODS[cell.method]
    return pc.compile(
        model(cell) if like is None else like,
        pc.Mesh(pipeline=RANKS, device="a100-80g"),
        microbatch(cell) if like is None else None,
        microbatches=MICROBATCHES,
        schedule="1f1b",
        vocabulary=vocabulary,
        stages=stages,
        recompute="none",
        precision="fp16",
        optimizer="adamw",
        progress=False,
    )


def model(cell: Cell) -> gpt.GPT:
    """The published GPT, without data: untied embeddings, learned positions."""
    config = gpt.Config(
        layers=LAYERS,
        heads=HEADS,
        hidden=HIDDEN,
        vocabulary=cell.words,
        sequence=cell.sequence,
        tied=False,
    )
    with torch.device("meta"):
        return gpt.GPT(config)


def microbatch(cell: Cell) -> dict[str, torch.Tensor]:
    """One sequence."""
    tokens = torch.zeros(1, cell.sequence, dtype=torch.long)
    return {"tokens": tokens, "labels": tokens}


def mfu(cell: Cell, seconds: float) -> float:
    """Percent of the peak that a step of so many seconds uses, by the published definition."""
    n, s = MICROBATCHES, cell.sequence
    head = 2 * n * s * HIDDEN * cell.words
    layer = 8 * n * s * HIDDEN**2 + 4 * n * s**2 * HIDDEN + 4 * n * s * HIDDEN * FFN
    return 100 * 3 * (head + LAYERS * layer) / RANKS / seconds / PEAK
