"""Does the cost model predict published training runs?

    python benchmarks/published/run.py [--only NAME ...]

Plans each run as it was published and prints its step beside what is predicted. It needs no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from rows import RUNS, Run, program


def main() -> None:
    """Print the table and what it amounts to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help="names or sources of rows")
    only = parser.parse_args().only
    columns = "source", "run", "tensor × pipeline × data", "published (s)", "predicted (s)", "ratio"
    print(f"| {' | '.join(columns)} | CPU s |")
    print("|---|---|---|---:|---:|---:|---:|")
    ratios: list[float] = []
    for run in RUNS:
        if not only or run.name in only or run.source in only:
            begin = time.process_time()
            predicted = program(run).simulate().step_time
            ratios.append(predicted / run.seconds)
            print(_row(run, predicted, time.process_time() - begin), flush=True)
    print(_summary(ratios))


def _row(run: Run, predicted: float, seconds: float) -> str:
    """One line of the table."""
    degrees = " × ".join(map(str, run.degrees))
    ratio = predicted / run.seconds
    cells = run.source, run.name, degrees, f"{run.seconds:.3f}", f"{predicted:.3f}", f"{ratio:.2f}"
    return f"| {' | '.join(cells)} | {seconds:.0f} |"


def _summary(ratios: Sequence[float]) -> str:
    """How far the predictions are off."""
    errors = [abs(ratio - 1) for ratio in ratios]
    return (
        f"median of the ratios {statistics.median(ratios):.3f}, of the errors "
        f"{100 * statistics.median(errors):.1f} %, largest {100 * max(errors):.1f} %"
    )


if __name__ == "__main__":
    main()
