"""One rank: training steps of compiled programs, of ZeroRedundancyOptimizer and of FSDP2, in turn.

torchrun --nproc-per-node 2 rank.py FOLDER --levels 0 1 ..., started by run.py. FOLDER has the
program of each level, and gets what each rank measured.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
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

    step.module = module  # type: ignore[attr-defined]
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


def sharded(hidden: int, microbatches: int, level: int) -> tuple[Step, torch.optim.Optimizer]:
    """FSDP2 as a level of ZeRO: parameters are gathered for each use (3), once in a step (1 and 2),
    and gradients scattered behind the last micro-batch (1) or behind each."""
    module = model(hidden)
    for layer in module.layers:
        fully_shard(layer, reshard_after_forward=level == 3)
    fully_shard(module, reshard_after_forward=level == 3)
    optimizer = torch.optim.AdamW(module.parameters(), **OPTIONS)

    def last(is_it: bool) -> None:
        module.set_requires_gradient_sync(is_it or level > 1)
        module.set_reshard_after_backward(is_it or level == 3)

    return theirs(module, optimizer, last, microbatches), optimizer


def states(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's states on this rank."""
    tensors = (t for state in optimizer.state.values() for t in state.values())
    found = (getattr(t, "_local_tensor", t) for t in tensors if isinstance(t, torch.Tensor))
    return sum(t.numel() * t.element_size() for t in found)


def peak(step: Step, own: Batch) -> int:
    """Bytes by which the process grows at most in a step: the kernel's high-water mark."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    step(own)
    return status("VmHWM") - before


def status(field: str) -> int:
    """Bytes of a field of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def held(step: Step, optimizer: torch.optim.Optimizer) -> int:
    """Bytes between steps: parameters, of which those of FSDP2 and of level 3 are rows, and states;
    DistributedDataParallel keeps its buckets, as large as the parameters."""
    worker, module = getattr(step, "__self__", None), getattr(step, "module", None)
    if isinstance(worker, pc.Worker):
        parameters = [parameter for _, parameter in worker.named_parameters()]
    else:
        assert isinstance(module, torch.nn.Module)
        parameters = [*module.parameters()] * (1 + isinstance(module, DistributedDataParallel))
    found = (getattr(p, "_local_tensor", p) for p in parameters)
    return sum(p.numel() * p.element_size() for p in found) + states(optimizer)


def main() -> None:
    """Time every variant in turn; write CPU and wall seconds of each step, or bytes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--levels", type=int, nargs="+", required=True)
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    steps: dict[str, Step] = {}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    with ExitStack() as stack:
        for level in options.levels:
            program = pc.load(options.folder / f"zero-{level}")
            worker = stack.enter_context(program.worker())
            count = worker.program.microbatches
            optimizers[f"zero={level}"] = worker.set_optimizer(torch.optim.AdamW, **OPTIONS)
            steps[f"zero={level}"] = worker.train_step
            if level:
                name = f"FSDP2 as zero={level}"
                steps[name], optimizers[name] = sharded(options.hidden, count, level)
            if level == 1:
                name = "ZeroRedundancyOptimizer"
                steps[name], optimizers[name] = redundant(options.hidden, count)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        losses: dict[str, list[float]] = {name: [] for name in steps}
        peaks: dict[str, list[int]] = {name: [] for name in steps}
        for number in range(options.steps + 2):
            for name, step in [*steps.items()][:: -1 if number % 2 else 1]:
                own = batch(count, ranks * number + rank)
                dist.barrier()
                if options.memory:
                    more = peak(step, own)
                    peaks[name].append(more + held(step, optimizers[name]))
                    continue
                wall, cpu = time.perf_counter(), time.process_time()
                loss = step(own)
                measured = time.process_time() - cpu, time.perf_counter() - wall
                mean = loss.clone()
                dist.all_reduce(mean)
                losses[name].append(float(mean / ranks))
                if number >= 2:
                    times[name].append(measured)
        sizes = {name: states(optimizer) for name, optimizer in optimizers.items()}
    dist.destroy_process_group()
    result = {"times": times, "losses": losses, "states": sizes, "peaks": peaks}
    (options.folder / f"rank_{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
