"""Does a step on two data ranks take less CPU time than with DistributedDataParallel?

    python benchmarks/data_parallel/run.py [--steps 20] [--hidden 256 512]

Both run in the same two processes (gloo, one thread each), a step of one and a step of the other
in turn, on the same weights and batches; CPU time is that of the whole process.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rank import batch, model

import parcompiler as pc


def measured(hidden: int, microbatches: int, steps: int) -> list[dict[str, Any]]:
    """What both ranks measured."""
    with tempfile.TemporaryDirectory() as folder:
        program = pc.compile(
            model(hidden), pc.Mesh(data=2), batch(1, 0), microbatches=microbatches, progress=False
        )
        path = program.export(Path(folder) / "program")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        script = Path(__file__).parent / "rank.py"
        numbers = ["--steps", str(steps), "--hidden", str(hidden)]
        subprocess.run(
            [*command, str(script), str(path), folder, *numbers],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return [json.loads((Path(folder) / f"rank_{r}.json").read_text()) for r in range(2)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512])
    options = parser.parse_args()
    print(
        "| hidden | micro-batches | step of | CPU (ms) | wall (ms) | CPU, ours over it | wall | "
        "difference of gradients |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for hidden in options.hidden:
        for microbatches in (1, 4):
            for row in rows(measured(hidden, microbatches, options.steps)):
                print(f"| {hidden} | {microbatches} | {row}", flush=True)


def rows(found: list[dict[str, Any]]) -> Iterator[str]:
    """The end of a row for each variant: medians over the steps of both ranks."""
    pairs = {
        name: [pair for own in found for pair in own["times"][name]] for name in found[0]["times"]
    }
    for name, own in pairs.items():
        cpu, wall = (1e3 * statistics.median(pair[k] for pair in own) for k in (0, 1))
        ratios = (
            statistics.median(a[k] / b[k] for a, b in zip(pairs["ours"], own, strict=True))
            for k in (0, 1)
        )
        figures = " | ".join(f"{ratio:.3f}" for ratio in ratios)
        error = f"{found[0]['error']:.0e}" if name == "ddp" else ""
        yield f"{name} | {cpu:.0f} | {wall:.0f} | {figures} | {error} |"


if __name__ == "__main__":
    main()
