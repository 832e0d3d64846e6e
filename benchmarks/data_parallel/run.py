"""Does a step on two data ranks take less CPU time than with DistributedDataParallel?

    python benchmarks/data_parallel/run.py [--steps 20]

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
from pathlib import Path

import rank as variant

import parcompiler as pc


def measured(microbatches: int, steps: int) -> list[dict]:
    """What both ranks measured."""
    with tempfile.TemporaryDirectory() as folder:
        inputs = variant.batch(1, 0)
        program = pc.compile(
            variant.model(), pc.Mesh(data=2), inputs, microbatches=microbatches, progress=False
        )
        path = program.export(Path(folder) / "program")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        script = Path(__file__).parent / "rank.py"
        subprocess.run(
            [*command, str(script), str(path), folder, "--steps", str(steps)],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return [json.loads((Path(folder) / f"rank_{r}.json").read_text()) for r in range(2)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    print("| micro-batches | variant | CPU (ms) | wall (ms) | CPU, ours over it | wall |")
    print("|---|---|---|---|---|---|")
    for microbatches in (1, 4):
        found = measured(microbatches, options.steps)
        names = list(found[0]["times"])
        pairs = {name: [pair for r in found for pair in r["times"][name]] for name in names}
        for name in names:
            cpu, wall = (statistics.median(pair[k] for pair in pairs[name]) for k in (0, 1))
            ratios = [
                statistics.median(
                    own[k] / other[k] for own, other in zip(pairs["ours"], pairs[name], strict=True)
                )
                for k in (0, 1)
            ]
            print(
                f"| {microbatches} | {name} | {1e3 * cpu:.0f} | {1e3 * wall:.0f} | "
                f"{ratios[0]:.3f} | {ratios[1]:.3f} |"
            )
        print(f"largest relative difference of a gradient: {found[0]['error']:.1e}", file=sys.stderr)


if __name__ == "__main__":
    main()
