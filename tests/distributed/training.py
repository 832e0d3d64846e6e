"""Trains exported programs on two ranks, one after another, and saves what each rank saw.

The folder has the programs and gets `rank_N.pt`.
"""

import os
import weakref
from pathlib import Path
from typing import Any

import torch

import parcompiler as pc
from tests import zoo

MICROBATCHES = 4
STEPS = 5


def batch(inputs: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Random tokens, images and labels in the form of one micro-batch's `inputs`."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for key, example in inputs.items():
        shape = (example.shape[0] * MICROBATCHES, *example.shape[1:])
        if example.dtype.is_floating_point:
            found[key] = torch.randn(shape, generator=generator)
        else:
            high = int(example.max()) + 1
            found[key] = torch.randint(0, high, shape, generator=generator)
    return found


class Alive:
    """Counts the micro-batches for which autograd keeps a tensor of one worker."""

    def __init__(self, worker: pc.Worker) -> None:
        self.peak = 0
        self._live: dict[int, int] = {}
        self._current = -1
        self._hooks = [
            stage.register_forward_pre_hook(self._next) for stage in worker.stages.values()
        ]

    def _next(self, *_: object) -> None:
        self._current += 1

    def pack(self, tensor: torch.Tensor) -> "Held":
        held, i = Held(tensor), self._current
        self._live[i] = self._live.get(i, 0) + 1
        weakref.finalize(held, self._drop, i)
        self.peak = max(self.peak, sum(count > 0 for count in self._live.values()))
        return held

    def _drop(self, i: int) -> None:
        self._live[i] -= 1

    def end(self) -> int:
        """What is still kept after the step."""
        for hook in self._hooks:
            hook.remove()
        return sum(self._live.values())


class Held:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def train(folder: Path, name: str) -> dict[str, Any]:
    """Losses, parameters, an evaluation and a trace of five steps."""
    inputs = zoo.build(name)[1]
    with pc.load(folder / name).worker() as worker:
        worker.set_optimizer(torch.optim.AdamW, lr=1e-3)
        losses = [worker.train_step(batch(inputs, seed)) for seed in range(STEPS)]
        evaluation = worker.evaluate(batch(inputs, 99))
        worker.record()
        worker.step(batch(inputs, 0))
        trace = [(str(r.instruction), r.begin, r.end, r.waited) for r in worker.trace()]
        worker.record(False)
        alive = Alive(worker)
        with torch.autograd.graph.saved_tensors_hooks(alive.pack, lambda held: held.tensor):
            worker.step(batch(inputs, 0))
        left = alive.end()
        pending = sum(len(queue) for queue in worker._channels._pending.values())
        own = {n: p.detach().clone() for n, p in worker.named_parameters()}
        gradients = {n: p.grad for n, p in worker.named_parameters() if p.grad is not None}
        whole = worker.gather_state_dict()
    return {
        "losses": torch.stack(losses),
        "evaluation": evaluation,
        "trace": trace,
        "peak": alive.peak,
        "left": left,
        "pending": pending,
        "own": own,
        "gradients": gradients,
        "whole": whole,
    }


def refused(folder: Path, rank: int) -> str:
    """What a rank says when the ranks run different programs."""
    try:
        pc.load(folder / ("gpt-tied" if rank == 0 else "resnet")).worker().close()
    except pc.LaunchError as error:
        return str(error)
    return ""


def lame(folder: Path, rank: int) -> str:
    """What a rank says when rank 1 cannot load its weights."""
    if rank == 1:
        (weights,) = (folder / "resnet" / "weights").glob("stage_1.*")
        weights.write_bytes(weights.read_bytes()[:-9])
    try:
        with pc.load(folder / "resnet").worker() as worker:
            worker.step(batch(zoo.build("resnet")[1], 0))
    except pc.ParcompilerError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(path: str) -> None:
    folder, rank = Path(path), int(os.environ["RANK"])
    found: dict[str, Any] = {name: train(folder, name) for name in ("gpt-tied", "resnet")}
    found["refused"] = refused(folder, rank)
    found["lame"] = lame(folder, rank)
    torch.save(found, folder / f"rank_{rank}.pt")
