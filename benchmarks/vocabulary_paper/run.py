"""Does the cost model predict the published speed and memory of vocabulary parallelism?

    python benchmarks/vocabulary_paper/run.py [--sequences 2048 4096] [--vocabularies 32 256]

Plans the GPT of 2411.05288 for eight A100 under its five methods and prints what was published
beside what is predicted. It needs no GPU and takes one to three minutes for all 40 cells.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paper import Cell, mfu, program, published

import parcompiler as pc
from parcompiler.cost.vocabulary import vocabulary_rows

NEAR = 0.03  # of the published MFU: methods that are closer have no order


@dataclass(frozen=True, slots=True)
class Row:
    """A cell with the predicted MFU in percent and memory in GiB."""

    cell: Cell
    mfu: float
    memory: float

    @property
    def points(self) -> float:
        """By how much the predicted MFU is too high, in points."""
        return self.mfu - self.cell.mfu

    @property
    def share(self) -> float:
        """By which share the predicted memory is too large."""
        return self.memory / self.cell.memory - 1


def main() -> None:
    """Print the table and what it amounts to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", nargs="+", type=int, default=[2048, 4096])
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[32, 64, 128, 256])
    asked = parser.parse_args()
    cells = [
        cell
        for cell in published()
        if cell.sequence in asked.sequences and cell.thousands in asked.vocabularies
    ]
    rows = predicted(cells)
    print(table(rows))
    print(summary(rows))


def predicted(cells: Iterable[Cell]) -> list[Row]:
    """What the compiler says of each cell; a model is captured once."""
    known: dict[tuple[int, int], pc.Program] = {}
    found = []
    for cell in cells:
        key = cell.sequence, cell.thousands
        made = program(cell, known.get(key))
        known.setdefault(key, made)
        step = made.simulate()
        peaks = [size - _wider(made, rank) for rank, size in enumerate(step.peak_memory)]
        found.append(Row(cell, mfu(cell, step.step_time), max(peaks) / 2**30))
    return found


def _wider(program: pc.Program, rank: int) -> int:
    """Bytes that gradients of a rank take more than in the published runs, which add them up in
    float16: Megatron-LM does so in float32 for bfloat16 alone."""
    graph = program.problem.graph
    names = {name for stage in program.lowered.on_rank(rank) for name in stage.tensors}
    own = [graph.by_name[name] for name in names]
    own += vocabulary_rows(graph, program.lowered.size) if graph.vocabulary else []
    return sum(2 * item.numel for item in own if item.trainable)


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| sequence | words | method | MFU published | predicted | error | GiB published "
        "| predicted | error |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        one = row.cell
        lines.append(
            f"| {one.sequence} | {one.thousands}k | {one.method} "
            f"| {one.mfu:.2f} % | {row.mfu:.2f} % | {row.points:+.2f} "
            f"| {one.memory:.2f} | {row.memory:.2f} | {100 * row.share:+.1f} % |"
        )
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """The errors, and the pairs of methods whose order is another one."""
    points = [abs(row.points) for row in rows]
    memory = statistics.fmean(abs(row.share) for row in rows)
    return "\n".join(
        [
            f"MFU: mean error {statistics.fmean(points):.2f} points, largest {max(points):.2f}",
            f"memory: mean error {100 * memory:.1f} %",
            f"pairs in the wrong order: {', '.join(misordered(rows)) or 'none'}",
        ]
    )


def misordered(rows: Sequence[Row]) -> list[str]:
    """Of each cell the pairs of methods of which the other one was measured as faster."""
    found = []
    for slow in rows:
        for fast in rows:
            here = (slow.cell.sequence, slow.cell.thousands)
            same = here == (fast.cell.sequence, fast.cell.thousands)
            apart = fast.cell.mfu > (1 + NEAR) * slow.cell.mfu
            if same and apart and fast.mfu <= slow.mfu:
                found.append(f"{fast.cell.method} and {slow.cell.method} at {here[0]}, {here[1]}k")
    return found


if __name__ == "__main__":
    main()
