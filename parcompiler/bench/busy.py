"""A process of the pool as a tensor rank that computes between collectives, for `local`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parcompiler.pieces import Shard
from parcompiler.runtime.axis import Axis

Verb = Callable[[torch.Tensor], object]

TIMEOUT = timedelta(minutes=5)
WARM = 3  # rounds that are not counted: they allocate memory
FEWEST, MOST = 12, 400
SIDE = 128  # of the matrices that are multiplied: a product takes less than 0.1 ms
MATRICES = 128  # used in turn: 8 MiB, more than caches hold
COLUMNS = 128  # of the piece of a value, if it is large enough


def measure(job: dict[str, Any]) -> None:
    """Take part in the rounds of a job, a `local.WaitQuery`, and write the times of this rank."""
    rank, size = job["rank"], job["size"]
    store = dist.FileStore(f"{job['out']}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    axis = Axis(rank, size, dist.group.WORLD, torch.device("cpu"))
    value, verb = _called(job, axis)
    with torch.no_grad():
        work = _work(axis, job["between"])
        number = min(MOST, max(FEWEST, int(job["seconds"] / job["between"])))
        rounds = [_round(work, value, verb) for _ in range(WARM + number)]
    (Path(job["out"]) / f"{rank}.json").write_text(json.dumps(rounds[WARM:]), encoding="utf-8")


def _round(work: Callable[[], None], value: torch.Tensor, verb: Verb) -> tuple[float, float]:
    """Seconds in the collective, and the CPU share of the work before it."""
    start, processor = time.perf_counter(), time.thread_time()
    work()
    value.fill_(1)  # as if the last operator had left it in the cache
    processor, middle = time.thread_time() - processor, time.perf_counter()
    verb(value)
    return time.perf_counter() - middle, processor / (middle - start)


def _work(axis: Axis, seconds: float) -> Callable[[], None]:
    """Matrix products that take `seconds` on rank 0; every rank computes the same number."""
    matrices = [torch.randn(SIDE, SIDE) for _ in range(MATRICES)]
    rows = torch.randn(SIDE, SIDE)

    def compute(number: int) -> None:
        for k in range(number):
            torch.mm(rows, matrices[k % MATRICES])

    compute(MATRICES)
    start = time.thread_time()
    compute(4 * MATRICES)
    one = (time.thread_time() - start) / (4 * MATRICES)
    count = axis.agreed(max(1, round(seconds / one)))
    return lambda: compute(count)


def _called(job: dict[str, Any], axis: Axis) -> tuple[torch.Tensor, Verb]:
    """A tensor of this rank, and the collective of the runtime to call on it."""
    dtype, n = getattr(torch, job["dtype"]), axis.size
    elements = job["nbytes"] / dtype.itemsize
    columns = n * max(1, min(COLUMNS, int(elements / n**2)))  # a rank may have a piece of each dim
    rows = max(1, round(elements / columns / n))
    first, second = Shard(0, (n * rows,)), Shard(1, (columns,))
    summed = job["action"] in ("all-reduce", "reduce-scatter")
    verbs: dict[str, Verb] = {
        "all-reduce": axis.all_reduce,
        "all-gather": lambda piece: axis.all_gather(piece, first),
        "reduce-scatter": lambda summand: axis.reduce_scatter(summand, first),
        "all-to-all": lambda piece: axis.all_to_all(piece, first, second),
        "rotation": lambda piece: _rotations(axis, piece),
    }
    return torch.ones(n * rows if summed else rows, columns, dtype=dtype), verbs[job["action"]]


def _rotations(axis: Axis, piece: torch.Tensor) -> torch.Tensor:
    """Pass all pieces round, as in ring attention."""
    row = piece.view(-1)
    for _ in range(axis.size - 1):
        row = axis.rotated(row)
    return row
