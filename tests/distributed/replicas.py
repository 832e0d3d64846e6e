"""Trains on two pipeline coordinates of two data ranks, or fails, and says what each rank saw.

main(FOLDER)            trains the programs there: rank_N.pt
main(PROGRAM, WAY, ...) prints what each way to fail raises
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

import parcompiler as pc
from tests import zoo

NAMES = ("gpt-tied", "resnet")
MICROBATCHES = 2
STEPS = 3


def batch(inputs: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Random tokens, images and labels for one data rank, in the form of its `inputs`."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for key, example in inputs.items():
        shape = (example.shape[0] * MICROBATCHES, *example.shape[1:])
        if example.dtype.is_floating_point:
            found[key] = torch.randn(shape, generator=generator, dtype=torch.float64)
        else:
            found[key] = torch.randint(0, int(example.max()) + 1, shape, generator=generator)
    return found


def train(folder: Path, name: str, rank: int) -> dict[str, Any]:
    """Losses, parameters, an evaluation and a trace."""
    inputs, coordinate = zoo.build(name)[1], pc.Mesh(pipeline=2, data=2).coordinate(rank)
    with pc.load(folder / name).worker() as worker:
        worker.set_optimizer(torch.optim.AdamW, lr=1e-3)
        losses, first = [], None
        for seed in range(STEPS):
            losses.append(worker.train_step(batch(inputs, 2 * seed + coordinate.data)))
            first = worker.gather_state_dict() if seed == 0 else first
        evaluation = worker.evaluate(batch(inputs, 90 + coordinate.data))
        own = {n: p.detach().clone() for n, p in worker.named_parameters()}
        whole = worker.gather_state_dict()
        worker.record()
        worker.step(batch(inputs, coordinate.data))
        trace = [(str(r.instruction), r.begin, r.end) for r in worker.trace()]
    return {
        "losses": torch.stack(losses),
        "first": first,
        "evaluation": evaluation,
        "own": own,
        "whole": whole,
        "trace": trace,
    }


def fail(way: str, worker: pc.Worker) -> None:
    """A good step, and then one that fails on some rank."""
    ids = torch.randint(0, zoo.VOCABULARY, (4, zoo.LENGTH), generator=torch.Generator())
    good = {"tokens": ids, "labels": ids}
    worker.train_step(good)
    if way == "a batch of another size on data rank 1" and worker.rank == 1:
        worker.train_step({key: tensor[:2] for key, tensor in good.items()})
    if way == "exception in a module on rank 3" and worker.rank == 3:
        worker.stages[1].register_forward_pre_hook(explode)
    if way == "death of rank 2" and worker.rank == 2:
        worker.close()
        return
    worker.train_step(good)


def explode(*_: object) -> None:
    message = "boom"
    raise ValueError(message)


def failing(folder: str, way: str) -> None:
    """Fail, and print what that raised."""
    start, raised = time.perf_counter(), ""
    worker = pc.load(folder).worker()
    worker.set_optimizer(torch.optim.SGD, lr=0.1)
    try:
        fail(way, worker)
    except pc.ParcompilerError as error:
        raised = f"{type(error).__name__}: {error}"
    finally:
        worker.close()
    seconds = time.perf_counter() - start
    answer = {"rank": worker.rank, "way": way, "raised": raised, "s": seconds}
    os.write(1, f"{json.dumps(answer)}\n".encode())  # at once: the ranks share the output


def main(folder: str, *ways: str) -> None:
    for way in ways:
        failing(folder, way)
    if not ways:
        rank = int(os.environ["RANK"])
        found = {name: train(Path(folder), name, rank) for name in NAMES}
        torch.save(found, Path(folder) / f"rank_{rank}.pt")
