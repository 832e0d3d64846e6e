"""One process of the comparison: both runtimes on one rank, step by step in turn."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from received import counting
from theirs import Theirs

import parcompiler as pc
from parcompiler.instruction import Kind
from parcompiler.runtime import Worker

TIMEOUT = timedelta(minutes=2)
WARM = 3  # pairs that are not counted
LETTERS = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "I",
    Kind.BACKWARD_WEIGHT: "W",
}


@dataclass(frozen=True, slots=True)
class Cost:
    """One step of one runtime on one rank, in seconds: CPU time of all threads and of the one that
    runs the step, and wall time."""

    processor: float
    main: float
    wall: float


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank found: the costs of each pair (ours, theirs), receive buffers in bytes, and
    the largest relative difference of loss and gradients."""

    pairs: list[tuple[Cost, Cost]]
    buffers: tuple[int, int]
    loss_error: float
    gradient_error: float


def main(rank: int, size: int, folder: str, schedule: str, pairs: int) -> None:
    """Measure on one rank of `size` the program that is exported in `folder`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    here = Path(folder)
    store = dist.FileStore(str(here / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        with pc.load(here / "program").worker() as worker:
            plan = json.loads((here / "program" / "plan.json").read_text(encoding="utf-8"))
            theirs = Theirs(worker, schedule, len(plan["stages"]), str(here / "orders.csv"))
            found = _compare(worker, theirs, torch.load(here / "batch.pt"), pairs)
            dist.barrier()  # nobody leaves while others are in their last step
        (here / f"rank_{rank}.json").write_text(json.dumps(asdict(found)), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def _compare(worker: Worker, theirs: Theirs, batch: dict[str, torch.Tensor], pairs: int) -> Found:
    """Check that both do the same, count buffers, then measure."""
    loss_error = _loss_error(_same_order(worker, theirs, batch), theirs.loss())
    gradient_error = _gradient_error(worker, theirs)
    ours, others = (lambda: worker.step(batch)), (lambda: theirs.step(batch))
    buffers = (_buffers(ours), _buffers(others))
    measured = [_pair(ours, others, turn) for turn in range(-WARM, pairs)]
    return Found(measured[WARM:], buffers, loss_error, gradient_error)


def _pair(ours: Callable[[], Any], others: Callable[[], Any], turn: int) -> tuple[Cost, Cost]:
    """A step of each; who begins alternates."""
    if turn % 2:
        second = _cost(others)
        return _cost(ours), second
    first = _cost(ours)
    return first, _cost(others)


def _cost(step: Callable[[], Any]) -> Cost:
    """Of one step that all ranks begin together."""
    gc.collect(0)
    dist.barrier()
    begin = time.process_time(), time.thread_time(), time.perf_counter()
    step()
    end = time.process_time(), time.thread_time(), time.perf_counter()
    return Cost(*(late - early for late, early in zip(end, begin, strict=True)))


def _buffers(step: Callable[[], Any]) -> int:
    """The most bytes of receive buffers that are alive at once in a step."""
    dist.barrier()
    with counting() as received:
        step()
    return received.most


def _same_order(worker: Worker, theirs: Theirs, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A step of both, in which they compute the same in the same order; our loss."""
    with theirs.recording() as order:
        theirs.step(batch)
    worker.record()
    loss = worker.step(batch)
    lines = [record.instruction for record in worker.trace()]
    worker.record(False)
    kept = [line for line in lines if line.kind in LETTERS]
    ours = [f"{line.stage}{LETTERS[line.kind]}{line.microbatch}" for line in kept]
    if ours != order:
        message = f"the orders differ on rank {worker.rank}: ours {ours}, theirs {order}"
        raise RuntimeError(message)
    return loss


def _loss_error(ours: torch.Tensor, theirs: torch.Tensor | None) -> float:
    """The relative difference, on the rank that knows their loss."""
    return 0.0 if theirs is None else abs(ours.item() / theirs.item() - 1)


def _gradient_error(worker: Worker, theirs: Theirs) -> float:
    """The largest difference in a tensor, relative to the largest gradient in it."""
    worst = 0.0
    for j, stage in worker.stages.items():
        others = dict(theirs.modules[j].named_parameters())
        for name, parameter in stage.named_parameters():
            ours, other = parameter.grad, others[name].grad
            assert ours is not None
            assert other is not None
            worst = max(worst, ((ours - other).abs().max() / other.abs().max()).item())
    return worst
