"""One of the processes: the steps of all programs in turn."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import parcompiler as pc
from parcompiler.instruction import COMPUTE
from parcompiler.runtime import Worker
from parcompiler.runtime.axis import Axis

TIMEOUT = timedelta(minutes=5)
WARM = 1  # rounds that are not counted
LEAST = 0.95  # of the time of its instructions a rank had the processor, or others disturbed it


VERBS = ("total", "largest", "whole", "own_total", "exchanged")  # of the tensor axis


class Exchanges:
    """Adds up the `seconds` that this rank is in collectives of the tensor axis."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False
        for name in VERBS:
            setattr(Axis, name, self._timed(getattr(Axis, name)))

    def _timed(self, verb: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any) -> torch.Tensor:
            if self._inside:  # one verb may use another
                return verb(*args)
            begin, self._inside = time.perf_counter(), True
            try:
                return verb(*args)
            finally:
                self.seconds += time.perf_counter() - begin
                self._inside = False

        return call


@dataclass(frozen=True, slots=True)
class Step:
    """A step in s, and the least share of its compute time that a rank had the processor."""

    seconds: float
    share: float


def stepping(rank: int, size: int, folder: str, programs: int, rounds: int, pause: float) -> None:
    """Steps of all programs; another one begins in every round."""
    here = Path(folder)
    _start(rank, size, here / "store")
    exchanges = Exchanges()
    workers = [pc.load(here / str(number)).worker() for number in range(programs)]
    batches = [torch.load(here / f"{number}.pt") for number in range(programs)]
    found: list[list[Step]] = [[] for _ in workers]
    for turn in range(-WARM, rounds):
        for k in range(programs):
            number = (k + turn) % programs
            time.sleep(pause)
            step = _step(workers[number], batches[number], exchanges)
            if turn >= 0:
                found[number].append(step)
    for worker in workers:
        worker.close()
    text = json.dumps([[asdict(step) for step in steps] for steps in found])
    (here / f"rank_{rank}.json").write_text(text, encoding="utf-8")
    dist.destroy_process_group()


def read(folder: Path, size: int, programs: int) -> list[Sequence[Step]]:
    """The steps of each program: as long as the rank that took longest."""
    ranks = [
        json.loads((folder / f"rank_{rank}.json").read_text(encoding="utf-8"))
        for rank in range(size)
    ]
    return [
        [
            Step(max(p["seconds"] for p in parts), min(p["share"] for p in parts))
            for parts in zip(*(rank[number] for rank in ranks), strict=True)
        ]
        for number in range(programs)
    ]


def _start(rank: int, size: int, path: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(path), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)


def _step(worker: Worker, batch: dict[str, torch.Tensor], exchanges: Exchanges) -> Step:
    """A step that all ranks begin together."""
    gc.collect()
    worker.record()
    dist.barrier()
    exchanges.seconds = 0.0
    seconds, processor = time.perf_counter(), time.thread_time()
    worker.step(batch)
    seconds, processor = time.perf_counter() - seconds, time.thread_time() - processor
    computed = sum(
        record.end - record.begin - record.waited
        for record in worker.trace()
        if record.instruction.kind in COMPUTE
    )
    return Step(seconds, processor / (computed - exchanges.seconds))
