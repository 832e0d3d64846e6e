"""One rank: training steps of compiled programs, of ZeroRedundancyOptimizer and of FSDP2, in turn.

torchrun --nproc-per-node 2 rank.py WHOLE SHARED OUT ..., started by run.py
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import parcompiler as pc
from parcompiler.models import gpt

SEQUENCE, VOCABULARY = 128, 8192
ROWS = 4  # of a micro-batch
OPTIONS = {"lr": 1e-3, "weight_decay": 0.1}
Batch = dict[str, torch.Tensor]
Step = Callable[[Batch], torch.Tensor]


def batch(microbatches: int, seed: int) -> Batch:
    """Random tokens for one data rank."""
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS * microbatches, SEQUENCE)
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


def model(hidden: int) -> gpt.GPT:
    """The model with the same weights wherever it is made."""
    torch.manual_seed(0)
    sizes = {"vocabulary": VOCABULARY, "sequence": SEQUENCE, "hidden": hidden}
    return gpt.GPT(gpt.Config(layers=4, heads=4, tied=False, **sizes))


def theirs(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    last: Callable[[bool], object],
    microbatches: int,
) -> Step:
    """A step that exchanges gradients with the last micro-batch; `last` says whether it is that."""

    def step(whole: Batch) -> torch.Tensor:
        losses = []
        pieces = zip(*(tensor.chunk(microbatches) for tensor in whole.values()), strict=True)
        for i, piece in enumerate(pieces):
            context = last(i + 1 == microbatches)
            with context if hasattr(context, "__enter__") else nullcontext():
                loss = module(*piece)
                (loss / microbatches).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()

    return step


def redundant(hidden: int, microbatches: int) -> tuple[Step, torch.optim.Optimizer]:
    """DistributedDataParallel with the states of whole parameters shared out."""
    wrapped = DistributedDataParallel(model(hidden))
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.AdamW, overlap_with_ddp=False, **OPTIONS
    )
    step = theirs(
        wrapped, optimizer, lambda last: nullcontext() if last else wrapped.no_sync(), microbatches
    )
    return step, optimizer.optim


def sharded(hidden: int, microbatches: int) -> tuple[Step, torch.optim.Optimizer]:
    """FSDP2, whose parameters stay gathered between forward and backward."""
    module = model(hidden)
    for layer in module.layers:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(module, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(module.parameters(), **OPTIONS)

    def last(is_it: bool) -> None:
        module.set_requires_gradient_sync(is_it)
        module.set_reshard_after_backward(is_it)

    return theirs(module, optimizer, last, microbatches), optimizer


def states(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's states on this rank."""
    tensors = (t for state in optimizer.state.values() for t in state.values())
    found = (getattr(t, "_local_tensor", t) for t in tensors if isinstance(t, torch.Tensor))
    return sum(t.numel() * t.element_size() for t in found)


def main() -> None:
    """Time every variant in turn; write CPU and wall seconds of each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("whole", type=Path)
    parser.add_argument("shared", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with pc.load(options.whole).worker() as whole, pc.load(options.shared).worker() as shared:
        count = whole.program.microbatches
        theirs_redundant, redundant_states = redundant(options.hidden, count)
        theirs_sharded, sharded_states = sharded(options.hidden, count)
        held = {
            "zero=0": whole.set_optimizer(torch.optim.AdamW, **OPTIONS),
            "zero=1": shared.set_optimizer(torch.optim.AdamW, **OPTIONS),
            "ZeroRedundancyOptimizer": redundant_states,
            "FSDP2": sharded_states,
        }
        steps: dict[str, Step] = {
            "zero=0": whole.train_step,
            "zero=1": shared.train_step,
            "ZeroRedundancyOptimizer": theirs_redundant,
            "FSDP2": theirs_sharded,
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        losses: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(options.steps + 2):
            for name, step in steps.items():
                own = batch(count, 2 * number + rank)
                dist.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                loss = step(own)
                measured = time.process_time() - cpu, time.perf_counter() - wall
                mean = loss.clone()
                dist.all_reduce(mean)
                losses[name].append(float(mean / 2))
                if number >= 2:
                    times[name].append(measured)
        sizes = {name: states(optimizer) for name, optimizer in held.items()}
    dist.destroy_process_group()
    result = {"times": times, "losses": losses, "states": sizes}
    (options.out / f"rank_{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
