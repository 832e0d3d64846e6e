"""Does what holds on a CPU hold on a GPU? One table, measured on this machine.

    python -m benchmarks.gpu [--device cuda] [--seconds 0.2] [--compiled] [--output table.md]
    python -m benchmarks.gpu --device cpu            the same lines at tiny sizes, without a GPU

It needs torch and the package's own dependencies. Proofs run on one rank and on --ranks of them
(one a device, and at least four, which then share devices); the rest is measured on the first one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.gpu.lines import LINES, Place, Row, environment, place_of


def main(given: Sequence[str] | None = None) -> int:
    """Print the table; 1 where a line fails, 2 without the device."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--ranks", type=int, help="ranks that prove (default: one a device, at least 4)"
    )
    parser.add_argument("--only", nargs="+", choices=LINES, default=[*LINES])
    parser.add_argument("--compiled", action="store_true", help="compiled variants on a CPU too")
    parser.add_argument("--seconds", type=float, default=0.2, help="of each calibration")
    parser.add_argument("--sizes", type=int, help="sizes of each kind that are calibrated")
    parser.add_argument("--calibration", type=Path, help="where the device file is written")
    parser.add_argument("--output", type=Path, help="where the table is written as well")
    options = parser.parse_args(given)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device was found by torch: --device cpu runs the lines at tiny sizes")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        place = place_of(options, Path(folder))
        text = [
            environment(place),
            "",
            "| line | what | measured | expected |",
            "|---|---|---|---|",
        ]
        print("\n".join(text), flush=True)
        rows: list[Row] = []
        for name in options.only:
            for row in _rows(name, place):
                rows.append(row)
                text.append(f"| {name} | {row.what} | {row.measured} | {row.expected} |")
                print(text[-1], flush=True)
    if options.output is not None:
        options.output.write_text("\n".join(text) + "\n", encoding="utf-8")
    failed = sum(not row.ok for row in rows)
    if failed:
        print(f"\n{failed} of {len(rows)} rows fail", file=sys.stderr)
    return int(failed > 0)


def _rows(name: str, place: Place) -> Iterator[Row]:
    """The rows of a line; an error is a row, so that the others are measured."""
    try:
        yield from LINES[name](place)
    except Exception as error:
        yield Row(type(error).__name__, " ".join(str(error).split()), "no error", ok=False)


if __name__ == "__main__":
    sys.exit(main())
