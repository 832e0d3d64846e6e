"""What does a step of a stack of layers cost, beside DTensor with the plan of Megatron-LM?

    python benchmarks/tensor_parallel/run.py [--steps 40] [--hidden 256 1024]

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

from stack import compiled


def measured(hidden: int, steps: int) -> list[dict[str, Any]]:
    """What both ranks measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = compiled(hidden).export(Path(folder) / "program")
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
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024])
    options = parser.parse_args()
    print(
        "| hidden | step of | CPU (ms) | wall (ms) | CPU, ours over it | wall | "
        "difference of loss and gradients |"
    )
    print("|---|---|---|---|---|---|---|")
    for hidden in options.hidden:
        for row in rows(measured(hidden, options.steps)):
            print(f"| {hidden} | {row}", flush=True)


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
        error = "" if name == "ours" else f"{max(own['error'] for own in found):.0e}"
        yield f"{name} | {cpu:.1f} | {wall:.1f} | {figures} | {error} |"


if __name__ == "__main__":
    main()
