"""How far the predicted memory of a rank is from what MemTracker sees it hold, as a table.

PYTHONPATH=. python benchmarks/memory/run.py [--models gpt,t5] [--schedules 1f1b] [--pipeline 2,4]
    [--data 2,4 --zero 0,1,2]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch

from parcompiler.errors import InfeasibleError, InputError
from tests.memory.cases import MODELS, compiled
from tests.memory.tracked import Rank

DTYPES = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "masters": (torch.float32, "bf16"),  # of a model in float32: bf16 with masters
}


class Row(NamedTuple):
    """A rank that was tracked. Bytes."""

    name: str
    dtype: str
    schedule: str
    recompute: str
    rank: str
    tracked: int
    predicted: int

    @property
    def error(self) -> float:
        """Of the prediction, relative."""
        return self.predicted / self.tracked - 1

    def __str__(self) -> str:
        """A line of the table."""
        mib = [f"{size / 2**20:.2f}" for size in (self.tracked, self.predicted)]
        return f"| {' | '.join([*self[:5], *mib, f'{100 * self.error:+.2f} %'])} |"


def rows(
    models: list[str],
    dtypes: list[str],
    schedules: list[str],
    pipelines: list[int],
    replicas: list[int],
    levels: list[int],
    microbatches: int,
) -> Iterator[Row]:
    """Every rank of every program."""
    data_ranks = [pair for pair in product(replicas, levels) if pair[0] > 1 or not pair[1]]
    grid = product(models, dtypes, pipelines, data_ranks, schedules, ("none", "full"))
    for name, dtype, pipeline, (data, zero), schedule, recompute in grid:
        own, precision = DTYPES[dtype]
        try:
            program = compiled(
                name, own, pipeline=pipeline, data=data, schedule=schedule,
                microbatches=microbatches, recompute=recompute, precision=precision, zero=zero,
            )  # fmt: skip
        except (InfeasibleError, InputError):  # more stages than blocks
            continue
        for rank, size in enumerate(program.simulate().peak_memory):
            held = Rank(program, rank).step()
            place = f"{rank} of {pipeline}"
            place += f", zero {zero} of {data}" if data > 1 else ""
            yield Row(name, dtype, schedule, recompute, place, held.peak, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--schedules", default="1f1b")
    parser.add_argument("--pipeline", default="2,4")
    parser.add_argument("--data", default="1")
    parser.add_argument("--zero", default="0")
    parser.add_argument("--microbatches", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | dtype | schedule | recompute | rank | tracked MiB | predicted MiB | error |")
    print("|---|---|---|---|---|---|---|---|")
    found = []
    words = given.models.split(","), given.dtypes.split(","), given.schedules.split(",")
    numbers = ([*map(int, text.split(","))] for text in (given.pipeline, given.data, given.zero))
    for row in rows(*words, *numbers, given.microbatches):
        print(row, flush=True)
        found.append(abs(row.error))
    print(
        f"\n{len(found)} ranks: mean {100 * statistics.mean(found):.2f} %, "
        f"largest {100 * max(found):.2f} %"
    )


if __name__ == "__main__":
    main()
