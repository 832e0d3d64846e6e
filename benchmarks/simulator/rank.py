"""One process of the measurement: all programs on one rank, step by step in turn."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import parcompiler as pc
from parcompiler.instruction import COMPUTE
from parcompiler.runtime import Worker

TIMEOUT = timedelta(minutes=5)
WARM = 1  # rounds that are not counted
REPEATS = 20  # of each message and sum


def main(
    rank: int, size: int, folder: str, turns: Sequence[str], options: Mapping[str, Any]
) -> None:
    """Measure on one rank of `size`: in each round a step of every program that `turns` names.

    Messages and sums, of as many bytes as `options` say, are measured before, between idle ranks.
    """
    torch.set_num_threads(1)
    here = Path(folder)
    store = dist.FileStore(str(here / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        workers = {name: pc.load(here / name).worker() for name in dict.fromkeys(turns)}
        found = {
            "messages": {nbytes: _message(rank, nbytes) for nbytes in options["messages"]},
            "sums": {nbytes: _sum(nbytes) for nbytes in options["sums"]},
            "rounds": _rounds(workers, turns, torch.load(here / "batch.pt"), options),
        }
        for worker in workers.values():
            worker.close()
        (here / f"rank_{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def _rounds(
    workers: Mapping[str, Worker],
    turns: Sequence[str],
    batch: Mapping[str, torch.Tensor],
    options: Mapping[str, Any],
) -> list[list[dict[str, Any]]]:
    """The steps of each round, as `turns` names them; another one begins in every round."""
    rounds = []
    for number in range(-WARM, options["rounds"]):
        steps: list[dict[str, Any]] = [{}] * len(turns)
        for k in range(len(turns)):
            turn = (k + number) % len(turns)
            time.sleep(options["pause"])
            steps[turn] = _step(workers[turns[turn]], batch)
        rounds.append(steps)
    return rounds[WARM:]


def _step(worker: Worker, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A step that all ranks begin together.

    Its seconds, the CPU seconds of the thread that computes, and of each compute instruction kind,
    stage and seconds, without those in which it waited for messages.
    """
    gc.collect()
    worker.record()
    dist.barrier()
    seconds, processor = time.perf_counter(), time.thread_time()
    worker.step(batch)
    seconds, processor = time.perf_counter() - seconds, time.thread_time() - processor
    computed = [
        (
            record.instruction.kind.value,
            record.instruction.stage,
            record.end - record.begin - record.waited,
        )
        for record in worker.trace()
        if record.instruction.kind in COMPUTE
    ]
    return {"seconds": seconds, "processor": processor, "computed": computed}


def _message(rank: int, nbytes: int) -> float:
    """Seconds of one message between two idle ranks: half of there and back."""
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    there, back = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)

    def trip() -> None:
        there(tensor, 1 - rank)
        back(tensor, 1 - rank)

    return _median(trip) / 2


def _sum(nbytes: int) -> float:
    """Seconds of adding up float32 numbers of `nbytes` in all over the ranks."""
    tensor = torch.zeros(max(1, nbytes // 4))
    return _median(lambda: dist.all_reduce(tensor))


def _median(work: Callable[[], object]) -> float:
    """Seconds of what all ranks begin together."""
    found = []
    for _ in range(REPEATS):
        dist.barrier()
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)
