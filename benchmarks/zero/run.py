"""Does a training step with shared states take less CPU time than FSDP2 or ZeroRedundancyOptimizer?

    python benchmarks/zero/run.py [--steps 15] [--hidden 256 512]

All run in the same two processes (gloo, one thread each), a step of each in turn, on the same
weights and batches; CPU time is that of the whole process.
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

OURS = "zero=1"


def measured(hidden: int, microbatches: int, steps: int) -> list[dict[str, Any]]:
    """What both ranks measured."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for level in (0, 1):
            program = pc.compile(
                model(hidden), pc.Mesh(data=2), batch(1, 0), microbatches=microbatches,
                zero=level, progress=False,
            )  # fmt: skip
            paths.append(str(program.export(Path(folder) / f"zero-{level}")))
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        script = Path(__file__).parent / "rank.py"
        numbers = ["--steps", str(steps), "--hidden", str(hidden)]
        subprocess.run(
            [*command, str(script), *paths, folder, *numbers],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return [json.loads((Path(folder) / f"rank_{r}.json").read_text()) for r in range(2)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512])
    options = parser.parse_args()
    print(
        "| hidden | micro-batches | step of | CPU (ms) | wall (ms) | CPU, zero=1 over it | wall | "
        "states (MB) | largest difference of losses |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for hidden in options.hidden:
        for microbatches in (1, 4):
            ranks = measured(hidden, microbatches, options.steps)
            ours = [pair for rank in ranks for pair in rank["times"][OURS]]
            for name in ranks[0]["times"]:
                pairs = [pair for rank in ranks for pair in rank["times"][name]]
                cpu, wall = (statistics.median(pair[k] for pair in pairs) * 1e3 for k in (0, 1))
                ratios = [
                    statistics.median(a[k] / b[k] for a, b in zip(ours, pairs, strict=True))
                    for k in (0, 1)
                ]
                first = ranks[0]["losses"]
                error = max(abs(a - b) for a, b in zip(first[OURS], first[name], strict=True))
                size = max(rank["states"][name] for rank in ranks) / 1e6
                print(
                    f"| {hidden} | {microbatches} | {name} | {cpu:.0f} | {wall:.0f} | "
                    f"{ratios[0]:.3f} | {ratios[1]:.3f} | {size:.1f} | {error:.0e} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
