"""Counts the bytes of parameters and of gradients that are in memory during a training step.

Rank 0 prints a line of JSON for each: with how many buckets of updated parameters are on their way
behind the step, how many are when someone has looked at the parameters, and the loss then.
"""

import json
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

import parcompiler as pc


def nbytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the storages of some tensors, each once."""
    found = [t.untyped_storage() for t in tensors if t is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def measured(folder: str, batch: dict[str, torch.Tensor]) -> dict[str, float]:
    """The most bytes of parameters at any layer's forward, and of gradients at any moment when one
    is final."""
    most: dict[str, float] = {"parameters": 0, "gradients": 0}
    with pc.load(folder).worker() as worker:
        worker.set_optimizer(torch.optim.SGD, lr=0.1)
        wholes = [p for stage in worker.stages.values() for p in stage.parameters()]
        tensors = [*wholes, *worker._updates.updated.values()]

        def look(*_: object) -> None:
            most["parameters"] = max(most["parameters"], nbytes(tensors))
            most["gradients"] = max(most["gradients"], nbytes(t.grad for t in tensors))

        for module in (m for stage in worker.stages.values() for m in stage.modules()):
            if isinstance(module, nn.Linear):
                module.register_forward_hook(look)
        for parameter in wholes:
            parameter.register_post_accumulate_grad_hook(look)
        worker.train_step(batch)
        parts = worker._interpreter.parts
        most["coming"] = len(parts._arriving) if parts else 0
        look()
        most["resident"] = nbytes(tensors)
        assert next(worker.named_parameters(), None)
        most["late"] = len(parts._arriving) if parts else 0
        worker.train_step(batch)
        most["loss"] = worker.evaluate(batch).item()
        return most


def main(data: str, *folders: str) -> None:
    """Measure the exported program in each folder."""
    dist.init_process_group("gloo")
    batch = torch.load(data, weights_only=True)
    lines = [json.dumps(measured(folder, batch)) for folder in folders]
    if dist.get_rank() == 0:
        print("\n".join(lines), flush=True)
    dist.destroy_process_group()
