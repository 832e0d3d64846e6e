"""Does the cost model predict published training runs?

    python benchmarks/published/run.py [--only NAME ...]

Plans each run as it was published and prints its step beside what is predicted. It needs no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

from rows import RUNS, Run, as_published, program


def main() -> None:
    """Print the table and what it amounts to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help="names or sources of rows")
    only = parser.parse_args().only
    columns = "source", "run", "tensor × pipeline × data", "published (s)", "predicted (s)", "ratio"
    print(f"| {' | '.join(columns)} | our runtime (s) | CPU s |")
    print("|---|---|---|---:|---:|---:|---:|---:|")
    ratios: list[float] = []
    tables: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for run in RUNS:
        if not only or run.name in only or run.source in only:
            begin = time.process_time()
            made = program(run)
            timeline = as_published(run, made)
            predicted = timeline.period if run.follow else timeline.step_time
            ratios.append(predicted / run.seconds)
            tables[run.source].append((run.seconds, predicted))
            own = made.simulate().step_time
            print(_row(run, predicted, own, time.process_time() - begin), flush=True)
    print(_summary(ratios))
    for source, steps in tables.items():
        if len(steps) > 2:
            print(f"{source}: rank correlation {_spearman(steps):.2f}")


def _row(run: Run, predicted: float, own: float, seconds: float) -> str:
    """One line of the table."""
    degrees = " × ".join(map(str, run.degrees))
    ratio = predicted / run.seconds
    cells = run.source, run.name, degrees, f"{run.seconds:.3f}", f"{predicted:.3f}", f"{ratio:.2f}"
    return f"| {' | '.join(cells)} | {own:.3f} | {seconds:.0f} |"


def _spearman(steps: Sequence[tuple[float, float]]) -> float:
    """The rank correlation of published and predicted steps, all different.

    >>> _spearman([(1.0, 2.0), (2.0, 1.0), (3.0, 3.0)])
    0.5
    """
    ranks = [[sorted(column).index(x) for x in column] for column in zip(*steps, strict=True)]
    apart = sum((a - b) ** 2 for a, b in zip(*ranks, strict=True))
    return 1 - 6 * apart / (len(steps) * (len(steps) ** 2 - 1))


def _summary(ratios: Sequence[float]) -> str:
    """How far the predictions are off."""
    errors = [abs(ratio - 1) for ratio in ratios]
    return (
        f"median of the ratios {statistics.median(ratios):.3f}, of the errors "
        f"{100 * statistics.median(errors):.1f} %, largest {100 * max(errors):.1f} %"
    )


if __name__ == "__main__":
    main()
