"""One rank: steps of the compiled program and of DistributedDataParallel, in turn, in one process.

torchrun --nproc-per-node 2 rank.py PROGRAM OUT ..., started by run.py
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import parcompiler as pc
from parcompiler.models import gpt

SEQUENCE, VOCABULARY = 128, 8192
ROWS = 4  # of a micro-batch
Step = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def batch(microbatches: int, seed: int) -> dict[str, torch.Tensor]:
    """Random tokens for one data rank."""
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS * microbatches, SEQUENCE)
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


def model(hidden: int) -> gpt.GPT:
    """The model with the same weights wherever it is made."""
    torch.manual_seed(0)
    sizes = {"vocabulary": VOCABULARY, "sequence": SEQUENCE, "hidden": hidden}
    return gpt.GPT(gpt.Config(layers=4, heads=4, tied=True, **sizes))


def theirs(hidden: int, microbatches: int, *, view: bool) -> tuple[Step, torch.nn.Module]:
    """A step of DistributedDataParallel: one all-reduce whatever the number of micro-batches."""
    wrapped = DistributedDataParallel(model(hidden), gradient_as_bucket_view=view)

    def step(whole: dict[str, torch.Tensor]) -> torch.Tensor:
        wrapped.zero_grad(set_to_none=True)
        losses = []
        pieces = zip(*(tensor.chunk(microbatches) for tensor in whole.values()), strict=True)
        for i, piece in enumerate(pieces):
            with wrapped.no_sync() if i + 1 < microbatches else nullcontext():
                loss = wrapped(*piece)
                (loss / microbatches).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return step, wrapped.module


def differences(ours: dict[str, torch.nn.Parameter], module: torch.nn.Module) -> Iterator[float]:
    """How far our gradients are from those of a module, relative to the largest of each tensor."""
    for name, parameter in module.named_parameters():
        found, wanted = ours[name].grad, parameter.grad
        assert found is not None and wanted is not None
        yield float((found - wanted).abs().max() / wanted.abs().max())


def main() -> None:
    """Time every variant in turn; write CPU and wall seconds of each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("program", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with pc.load(options.program).worker() as worker:
        count = worker.program.microbatches
        plain, module = theirs(options.hidden, count, view=False)
        viewed, _ = theirs(options.hidden, count, view=True)
        steps: dict[str, Step] = {"ours": worker.step, "ddp": plain, "ddp, views": viewed}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for number in range(options.steps + 2):
            for name, step in steps.items():
                own = batch(count, 2 * number + rank)
                dist.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                step(own)
                measured = time.process_time() - cpu, time.perf_counter() - wall
                if number >= 2:
                    times[name].append(measured)
        error = max(differences(dict(worker.named_parameters()), module))
    dist.destroy_process_group()
    result = {"times": times, "error": error}
    (options.out / f"rank_{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
