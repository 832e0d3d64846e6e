"""Does attention on context ranks cost less than with torch's context_parallel?

    python benchmarks/context/run.py [--rounds 9] [--rows 2048]
    python benchmarks/context/run.py --growth 1 2 4 8 [--rows 1024]

Causal attention, forward and backward, of a sequence whose rows are in pieces on gloo ranks of one
thread each. All variants run in turn in the same processes, on the same numbers, and the result
and gradients of each are compared with those of one process. `context_parallel` has no CPU
kernel of its own: torch's ring gets the one that `scaled_dot_product_attention` has there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _templated_ring_attention,
    _templated_ring_attention_backward,
    set_rotate_method,
)
from torch.nn import functional as F

from parcompiler import runtime
from parcompiler.pieces import Shard
from parcompiler.runtime.axis import Axis

HEADS, SIZE = 8, 64
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
Attention = Callable[..., torch.Tensor]


def by_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """As emitted: keys and values gathered."""
    pair = (
        runtime.all_gather(x, 2, partial=True, zigzag=True, axis="context") for x in (key, value)
    )
    return runtime.attention_of_rows(query, *pair, zigzag=True, axis="context")


def by_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """As emitted: rows for heads, and back."""
    query, key, value = (
        runtime.all_to_all(x, 2, 1, zigzag=True, axis="context") for x in (query, key, value)
    )
    made = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return runtime.all_to_all(made, 1, 2, to_zigzag=True, axis="context")


def in_a_ring(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """As emitted: keys and values go round."""
    return runtime.ring_attention(query, key, value, is_causal=True, zigzag=True, axis="context")


class Ring(torch.autograd.Function):
    """torch's ring with the kernel of the CPU, as `context_parallel` calls it with others."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, method: str
    ) -> torch.Tensor:
        set_rotate_method(method)
        world: Any = dist.group.WORLD
        result, sums = _templated_ring_attention(
            world, 2, FORWARD, query, key, value, is_causal=True
        )
        ctx.save_for_backward(query, key, value, result, sums)
        ctx.method = method
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        set_rotate_method(ctx.method)

        def kernel(query: Any, key: Any, value: Any, **more: Any) -> Any:
            return BACKWARD(more.pop("grad_out"), query, key, value, dropout_p=0.0, **more)

        world: Any = dist.group.WORLD
        query, key, value, result, sums = ctx.saved_tensors
        found = _templated_ring_attention_backward(
            world, 2, kernel, gradients[0], "grad_out", query, key, value, result, sums, True
        )
        return *found, None


VARIANTS: dict[str, Attention] = {
    "parcompiler, by rows": by_rows,
    "parcompiler, by heads": by_heads,
    "parcompiler, ring": in_a_ring,
    "torch, allgather": lambda *operands: Ring.apply(*operands, "allgather"),
    "torch, alltoall": lambda *operands: Ring.apply(*operands, "alltoall"),
}


def rank_main(rank: int, n: int, rows: int, rounds: int, names: list[str], folder: str) -> None:
    """Measure on one rank; writes seconds, bytes and errors."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", n)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
    torch.manual_seed(0)
    whole = [torch.randn(1, HEADS, rows, SIZE) for _ in range(4)]
    shard = Shard(2, (rows,), zigzag=True)
    *own, gradient = (shard.take(x, n, rank).contiguous() for x in whole)
    leaves = [x.requires_grad_() for x in whole[:3]]
    query, key, value = leaves
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    right = [expected, *torch.autograd.grad(expected, leaves, whole[3])]
    right = [shard.take(x.detach(), n, rank) for x in right]
    operands = [x.detach().requires_grad_() for x in own]
    world: Any = dist.group.WORLD
    found: dict[str, dict[str, Any]] = {name: {"cpu": [], "wall": []} for name in names}
    with Axis(rank, n, world, torch.device("cpu"), name="context").active():
        for _ in range(rounds + 1):
            for name in names:
                dist.barrier()
                begin = time.process_time(), time.perf_counter()
                result = VARIANTS[name](*operands)
                gradients = torch.autograd.grad(result, operands, gradient)
                found[name]["cpu"].append(time.process_time() - begin[0])
                found[name]["wall"].append(time.perf_counter() - begin[1])
                pairs = zip((result, *gradients), right, strict=True)
                found[name]["error"] = max(float((a - b).abs().max()) for a, b in pairs)
        for name in names:
            found[name]["bytes"] = peak(VARIANTS[name], operands, gradient)
    dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def peak(attention: Attention, operands: list[torch.Tensor], gradient: torch.Tensor) -> int:
    """The most bytes that tensors of a forward and backward take beside its operands."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        torch.autograd.grad(attention(*operands), operands, gradient)
    profiler: Any = profile.profiler
    events = profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(nbytes for _, nbytes in changes))


def measured(n: int, rows: int, rounds: int, names: list[str]) -> list[dict[str, Any]]:
    """What all ranks measured, without the first round."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = n, rows, rounds, names, folder
        torch.multiprocessing.spawn(rank_main, arguments, nprocs=n)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(n)]
    for own in found:
        for variant in own.values():
            variant["cpu"], variant["wall"] = variant["cpu"][1:], variant["wall"][1:]
    return found


def total(found: list[dict[str, Any]], name: str, key: str) -> list[float]:
    """The sum over ranks for each round, in seconds."""
    return [sum(times) for times in zip(*(own[name][key] for own in found), strict=True)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=2048, help="with --growth, for each rank")
    parser.add_argument("--growth", type=int, nargs="+", help="numbers of ranks")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    if options.growth:
        return growth(options.growth, options.rows, options.rounds)
    print("| ranks | rows | variant | CPU of all (ms) | slowest rank | CPU | peak (MB) | error |")
    print("|---|---|---|---|---|---|---|---|")
    for n in (2, 4):
        found = measured(n, options.rows, options.rounds, list(VARIANTS))
        base = total(found, "torch, allgather", "cpu")
        for name in VARIANTS:
            own = total(found, name, "cpu")
            ratio = statistics.median(a / b for a, b in zip(own, base, strict=True))
            slowest = max(statistics.median(x[name]["cpu"]) for x in found)
            most, error = (max(x[name][key] for x in found) for key in ("bytes", "error"))
            print(
                f"| {n} | {options.rows:,} | {name} | {1e3 * statistics.median(own):.0f} | "
                f"{1e3 * slowest:.0f} | {ratio:.2f} | {most / 1e6:.1f} | {error:.0e} |",
                flush=True,
            )
    return None


def growth(degrees: list[int], rows: int, rounds: int) -> None:
    """A table of the cost of one rank, at as many rows for each."""
    print("| ranks | rows | CPU of a rank (ms) | over one | in theory | peak of a rank (MB) |")
    print("|---|---|---|---|---|---|")
    name, first = "parcompiler, by rows", 0.0
    for n in degrees:
        found = measured(n, n * rows, rounds, [name])
        cpu = statistics.median(statistics.median(x[name]["cpu"]) for x in found)
        first = first or cpu
        most = max(x[name]["bytes"] for x in found)
        figures = f"{1e3 * cpu:.0f} | {cpu / first:.2f} | {n} | {most / 1e6:.1f}"
        print(f"| {n} | {n * rows:,} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
