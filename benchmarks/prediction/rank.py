"""The processes that run the steps: they wait, without computing, for the next program."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import parcompiler as pc
from parcompiler.instruction import COMPUTE
from parcompiler.runtime import Worker
from parcompiler.runtime.axis import Axis

TIMEOUT = timedelta(minutes=5)
POLL = 0.1  # s between two looks at whether all ranks are done
WARM, STEPS = 1, 3  # of each program, in each round; the first are not counted
LEAST = 0.95  # of the time of its instructions a rank had the processor, or others disturbed it


VERBS = (
    "all_reduce",
    "all_reduce_max",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
)  # of the tensor axis


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


class Ranks:
    """Processes that load a program and take some steps of it, whenever they are asked."""

    def __init__(self, size: int, folder: Path) -> None:
        """Start them; `folder` is where they meet."""
        context = multiprocessing.get_context("spawn")
        self._asked = [context.SimpleQueue() for _ in range(size)]
        self._found = [context.SimpleQueue() for _ in range(size)]
        arguments = size, folder / "store", self._asked, self._found
        self._processes = multiprocessing.spawn(_serve, arguments, nprocs=size, join=False)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for queue in self._asked:
            queue.put(None)
        self._processes.join()

    def step(self, program: Path, batch: Path) -> list[Step]:
        """Steps of an exported program: each as long as the rank that took longest."""
        for queue in self._asked:
            queue.put((program, batch))
        while any(queue.empty() for queue in self._found):
            self._processes.join(timeout=POLL)  # raises where one has failed
        ranks = [queue.get() for queue in self._found]
        return [
            Step(max(part.seconds for part in parts), min(part.share for part in parts))
            for parts in zip(*ranks, strict=True)
        ]


def _serve(rank: int, size: int, store: Path, asked: list[Any], found: list[Any]) -> None:
    """Steps of one program after another, until there is none."""
    _start(rank, size, store)
    exchanges = Exchanges()
    while (message := asked[rank].get()) is not None:
        program, batch = message
        worker, rows = pc.load(program).worker(), torch.load(batch)
        found[rank].put([_step(worker, rows, exchanges) for _ in range(WARM + STEPS)][WARM:])
        worker.close()
    dist.destroy_process_group()


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
