"""One process of the comparison: a worker for every method, which take steps in turn."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import parcompiler as pc
from parcompiler.models import gpt
from parcompiler.runtime import Worker

TIMEOUT = timedelta(minutes=10)
WARM = 1  # rounds that are not counted
ALONE = "one process"


@dataclass(frozen=True, slots=True)
class Cost:
    """One step on one rank, in seconds: CPU time of all its threads, and wall time."""

    processor: float
    wall: float


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank found, by method: the cost of each round, the loss, bytes of parameters."""

    costs: dict[str, list[Cost]]
    losses: dict[str, float]
    parameters: dict[str, int]


def main(rank: int, size: int, folder: str, methods: Sequence[str], rounds: int) -> None:
    """Measure on one rank of `size` the programs that are exported in `folder`."""
    torch.set_num_threads(1)
    here = Path(folder)
    store = dist.FileStore(str(here / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    batch = torch.load(here / "batch.pt")
    workers = {method: pc.load(here / method).worker() for method in methods}
    steps = {method: _stepping(worker, batch) for method, worker in workers.items()}
    if rank == 0:
        steps[ALONE] = _alone(here, batch)
    else:
        steps[ALONE] = lambda: 0.0
    found = Found({name: [] for name in steps}, {}, _parameters(workers))
    for turn in range(-WARM, rounds):
        names = list(steps)
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            cost, found.losses[name] = _cost(steps[name])
            if turn >= 0:
                found.costs[name].append(cost)
    dist.barrier()  # nobody leaves while others are in their last step
    for worker in workers.values():
        worker.close()
    (here / f"rank_{rank}.json").write_text(json.dumps(asdict(found)), encoding="utf-8")
    dist.destroy_process_group()


def _stepping(worker: Worker, batch: object) -> Callable[[], float]:
    """A step that gives its loss."""
    return lambda: worker.step(batch).item()


def _alone(here: Path, batch: dict[str, torch.Tensor]) -> Callable[[], float]:
    """A step of the model in this process alone, one micro-batch after another."""
    config, microbatches = torch.load(here / "model.pt", weights_only=False)
    torch.manual_seed(0)
    model = gpt.GPT(config)
    pieces = [t.chunk(microbatches) for t in batch.values()]

    def step() -> float:
        model.zero_grad(set_to_none=True)
        total = 0.0
        for tokens, labels in zip(*pieces, strict=True):
            loss = model(tokens, labels) / microbatches
            loss.backward()
            total += loss.item()
        return total

    return step


def _cost(step: Callable[[], float]) -> tuple[Cost, float]:
    """Of one step that all ranks begin together."""
    gc.collect(0)
    dist.barrier()
    begin = time.process_time(), time.perf_counter()
    loss = step()
    end = time.process_time(), time.perf_counter()
    return Cost(*(late - early for late, early in zip(end, begin, strict=True))), loss


def _parameters(workers: dict[str, Worker]) -> dict[str, int]:
    """Bytes of the parameters that this rank holds."""
    return {
        method: sum(p.nbytes for _, p in worker.named_parameters())
        for method, worker in workers.items()
    }
