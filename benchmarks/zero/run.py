"""Does a training step of each level take less CPU time and memory than FSDP2's?

    python benchmarks/zero/run.py [--steps 9] [--hidden 256] [--ranks 2 4] [--levels 0 1 2 3]

All run in the same processes (gloo, one thread each), a step of each in turn, on the same weights
and batches; CPU time is that of the whole process. The allocator keeps the memory that it has: what
it would give back and take again, a page fault for every 4 KB, depends on what else the process
has. Peak bytes are those of another run, in which it gives memory back at once: what the kernel
says that the process has grown by in a step, and what is there between steps.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rank import batch, model

import parcompiler as pc

KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**40)}
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0"}


def measured(
    hidden: int, microbatches: int, steps: int, ranks: int, levels: list[int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The times that all ranks measured, and their bytes."""
    with tempfile.TemporaryDirectory() as folder:
        for level in levels:
            program = pc.compile(
                model(hidden), pc.Mesh(data=ranks), batch(1, 0), microbatches=microbatches,
                zero=level, progress=False,
            )  # fmt: skip
            program.export(Path(folder) / f"zero-{level}")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += [str(Path(__file__).parent / "rank.py"), folder, "--hidden", str(hidden)]
        command += ["--levels", *map(str, levels)]
        found = []
        for more, environment in (
            (["--steps", str(steps)], KEEPING),
            (["--steps", "1", "--memory"], RETURNING),
        ):
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
            subprocess.run([*command, *more], check=True, env=environment)
            paths = (Path(folder) / f"rank_{rank}.json" for rank in range(ranks))
            found.append([json.loads(path.read_text()) for path in paths])
        return found[0], found[1]


def rival(name: str) -> str:
    """The level that a variant is compared with."""
    return "zero=1" if name == "ZeroRedundancyOptimizer" else name.removeprefix("FSDP2 as ")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--levels", type=int, nargs="+", default=[0, 1, 2, 3])
    options = parser.parse_args()
    print(
        "| ranks | hidden | micro-batches | step of | CPU (ms) | wall (ms) | CPU, our level over "
        "it | wall | peak (MB) | peak, our level over it | states (MB) | largest difference of "
        "losses |"
    )
    print("|---" * 12 + "|")
    cases = [(r, h, m) for r in options.ranks for h in options.hidden for m in options.microbatches]
    for count, hidden, microbatches in cases:
        ranks, sizes = measured(hidden, microbatches, options.steps, count, options.levels)
        peaks = {name: max(r["peaks"][name][-1] for r in sizes) for name in ranks[0]["times"]}
        for name in ranks[0]["times"]:
            pairs = [pair for rank in ranks for pair in rank["times"][name]]
            ours = [pair for rank in ranks for pair in rank["times"][rival(name)]]
            cpu, wall = (statistics.median(pair[k] for pair in pairs) * 1e3 for k in (0, 1))
            ratios = [
                statistics.median(a[k] / b[k] for a, b in zip(ours, pairs, strict=True))
                for k in (0, 1)
            ]
            losses = ranks[0]["losses"]
            first = losses[f"zero={options.levels[0]}"]
            error = max(abs(a - b) for a, b in zip(first, losses[name], strict=True))
            states = max(rank["states"][name] for rank in ranks) / 1e6
            print(
                f"| {count} | {hidden} | {microbatches} | {name} | {cpu:.0f} | {wall:.0f} | "
                f"{ratios[0]:.3f} | {ratios[1]:.3f} | {peaks[name] / 1e6:.1f} | "
                f"{peaks[rival(name)] / peaks[name]:.3f} | {states:.1f} | {error:.0e} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
