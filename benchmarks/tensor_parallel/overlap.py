"""How long do tensor ranks wait for collectives that run beside products for weights?

    python benchmarks/tensor_parallel/overlap.py [--steps 30] [--hidden 512 1024] [--threads 2]

Two processes (gloo) take steps of one program in two forms in turn: as it runs, and with each
collective waited for before the products are computed that are left for it. The time that a rank
waits for its collectives is exposed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from stack import batch, compiled

import parcompiler as pc
from parcompiler.runtime.axis import Axis

WARM = 3  # steps of each form that are not counted


class Waits:
    """Stands for `Axis._finish`; adds up the seconds in which a rank waits."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.beside = True

    def __call__(self, axis: Axis, work: dist.Work) -> None:
        """Wait behind what runs beside the collective, or before it."""
        if self.beside and axis.beside is not None:
            axis.beside()
        begin = time.perf_counter()
        work.wait()
        self.seconds += time.perf_counter() - begin
        if not self.beside and axis.beside is not None:
            axis.beside()


def rank(program: Path, out: Path, hidden: int, steps: int, threads: int) -> None:
    """One rank: steps of both forms in turn; writes what each took."""
    torch.set_num_threads(threads)
    dist.init_process_group("gloo")
    waits = Waits()
    Axis._finish = lambda axis, work: waits(axis, work)  # type: ignore[method-assign]
    times: dict[str, list[tuple[float, float]]] = {"overlapped": [], "in turn": []}
    gradients: dict[str, list[torch.Tensor]] = {}
    with pc.load(program).worker() as worker:
        for number in range(steps + WARM):
            x = batch(hidden, number)
            for name in list(times)[:: 1 if number % 2 else -1]:
                waits.beside, waits.seconds = name == "overlapped", 0.0
                dist.barrier()
                begin = time.perf_counter()
                worker.step((x,))
                if number >= WARM:
                    times[name].append((waits.seconds, time.perf_counter() - begin))
                found = dict(worker.named_parameters()).values()
                gradients[name] = [p.grad.clone() for p in found if p.grad is not None]
                for parameter in found:
                    parameter.grad = None
            pairs = zip(*gradients.values(), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)
    number = dist.get_rank()
    dist.destroy_process_group()
    (out / f"rank_{number}.json").write_text(json.dumps(times))


def measured(hidden: int, steps: int, threads: int) -> list[dict[str, Any]]:
    """What both ranks measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = compiled(hidden).export(Path(folder) / "program")
        given = ["--rank", str(path), folder, "--hidden", str(hidden), "--steps", str(steps)]
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        subprocess.run(
            [*command, __file__, *given, "--threads", str(threads)],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"},
        )
        return [json.loads((Path(folder) / f"rank_{r}.json").read_text()) for r in range(2)]


def main() -> None:
    """Print the table, or be a rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rank", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(*options.rank, options.hidden[0], options.steps, options.threads)
        return
    print("| hidden | exposed, in turn (ms) | overlapped (ms) | ratio | step, ratio |")
    print("|---:|---:|---:|---:|---:|")
    for hidden in options.hidden:
        found = measured(hidden, options.steps, options.threads)
        both = [[pair for own in found for pair in own[name]] for name in ("in turn", "overlapped")]
        exposed = [1e3 * statistics.median(pair[0] for pair in own) for own in both]
        ratios = [
            statistics.median(new[k] / old[k] for old, new in zip(*both, strict=True))
            for k in (0, 1)
        ]
        cells = *(f"{ms:.1f}" for ms in exposed), *(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {hidden} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
