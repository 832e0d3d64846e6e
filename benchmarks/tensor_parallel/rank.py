"""One rank: steps of the emitted layers and of the same layers under DTensor, in turn.

torchrun --nproc-per-node 2 rank.py PROGRAM OUT ..., started by run.py
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from stack import batch, stack
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import parcompiler as pc

Step = Callable[[Tensor], Tensor]
WARM = 3  # steps that are not counted
COLUMNS, ROWS = ("attention.qkv", "ffn.up"), ("attention.out", "ffn.down")


def theirs(hidden: int) -> tuple[Step, nn.Module]:
    """A step of the layers under the plan of Megatron-LM, as PyTorch's tutorial writes it."""
    mesh = init_device_mesh("cpu", (2,))
    module = stack(hidden)
    for layer in module.layers:
        plan = {name: ColwiseParallel() for name in COLUMNS}
        parallelize_module(layer, mesh, {**plan, **{name: RowwiseParallel() for name in ROWS}})

    def step(x: Tensor) -> Tensor:
        module.zero_grad(set_to_none=True)
        loss: Tensor = module(x)
        loss.backward()
        return loss.detach()

    return step, module


def differences(ours: dict[str, nn.Parameter], module: nn.Module) -> Iterator[float]:
    """How far our gradients are from those of a module, relative to the largest of each tensor."""
    for name, parameter in module.named_parameters():
        found, wanted = ours[name].grad, parameter.grad
        wanted = wanted.to_local() if isinstance(wanted, DTensor) else wanted
        assert found is not None and wanted is not None
        yield float((found - wanted).abs().max() / wanted.abs().max())


def main() -> None:
    """Time both in turn; write CPU and wall seconds of each step."""
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
        step, module = theirs(options.hidden)
        steps: dict[str, Step] = {"ours": lambda x: worker.step((x,)), "dtensor": step}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        losses = []
        for number in range(options.steps + WARM):
            x = batch(options.hidden, number)  # the same on both ranks
            # Who is first takes turns: what one leaves in the caches is no gain of the other.
            order = list(steps) if number % 2 else list(steps)[::-1]
            found = {}
            for name in order:
                dist.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                found[name] = float(steps[name](x))
                measured = time.process_time() - cpu, time.perf_counter() - wall
                if number >= WARM:
                    times[name].append(measured)
            losses.append(abs(found["ours"] / found["dtensor"] - 1))
        error = max(*losses, *differences(dict(worker.named_parameters()), module))
    dist.destroy_process_group()
    result = {"times": times, "error": error}
    (options.out / f"rank_{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
