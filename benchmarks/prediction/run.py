"""Does a step take as long as `compile(..., costs="measured")` predicts?

    python benchmarks/prediction/run.py [--cases "gpt 1f1b" ...] [--rounds 3]

Twelve programs of models, meshes and schedules, each for two processes of one thread. What is
predicted comes from the templates alone, which are timed before a step runs, and from what messages
and collectives take by `parcompiler calibrate`. Machines are faster and slower by the minute: so
each round predicts right before its steps and right after them, and an error is the median of the
rounds'.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cases import CASES, Case
from rank import LEAST, Ranks, Step

import parcompiler as pc

RANKS = 2
HEADER = "| model | mesh | schedule | vocabulary | predicted (s) | measured (s) | error | rounds |"


@dataclass(frozen=True, slots=True)
class Round:
    """A program, the seconds that are predicted of its step, and the steps right after."""

    program: pc.Program
    predicted: float
    steps: Sequence[Step]

    @property
    def measured(self) -> float:
        """The median in s of the steps that nobody disturbed, or of all."""
        quiet = [step for step in self.steps if step.share >= LEAST]
        return statistics.median(step.seconds for step in quiet or self.steps)

    @property
    def error(self) -> float:
        """What is predicted too much, as a share of what is measured."""
        return self.predicted / self.measured - 1


def main() -> None:
    """Print the table."""
    options = _options()
    torch.set_num_threads(1)
    names = options.cases or list(CASES)
    found: dict[str, list[Round]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder, Ranks(RANKS, Path(folder)) as ranks:
        for turn in range(options.rounds):
            device = _device(Path(folder))
            for name in (*names[turn:], *names[:turn]):
                found[name].append(_round(CASES[name], device, ranks))
    _print(found)


def _options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, help="all of them")
    parser.add_argument("--rounds", type=int, default=3, help="of all cases (3)")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def _round(case: Case, device: Path, ranks: Ranks) -> Round:
    """Predict a step of the case, take some, and predict it again: the mean of both counts."""
    program = _compiled(case, device)
    with tempfile.TemporaryDirectory() as name:
        folder = program.export(Path(name) / "program")
        torch.save(case.batch(), folder / "batch.pt")
        steps = ranks.step(folder, folder / "batch.pt")
    both = program, _compiled(case, device, program)
    return Round(program, statistics.fmean(one.simulate().step_time for one in both), steps)


def _device(folder: Path) -> Path:
    """The figures of this machine, as `parcompiler calibrate` finds them on two processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    path = folder / "cpu.json"
    calibrate = ["-m", "parcompiler", "calibrate", "--output", str(path), "--seconds", "0.05"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*torchrun, *calibrate], check=True, capture_output=True, env=environment)
    return path


def _compiled(case: Case, device: Path, like: pc.Program | None = None) -> pc.Program:
    """The program of a case, from what its templates take here; with the stages of another."""
    mesh = pc.Mesh(**case.mesh, device=str(device))
    options = case.options | {"costs": "measured", "progress": False}
    if like is None:
        return pc.compile(case.model(), mesh, case.inputs(), **options)
    counts = [len(stage.blocks) for stage in like.plan.stages or ()]
    return pc.compile(like, mesh, stages=counts, **options)


def _print(found: dict[str, list[Round]]) -> None:
    """The table, and its median and largest error."""
    print(f"{HEADER}\n|{'---|' * (HEADER.count('|') - 1)}")
    for name, rounds in found.items():
        plan: Any = rounds[0].program.plan
        method = plan.vocabulary.method if plan.vocabulary else "whole"
        axes = " ".join(f"{axis} {degree}" for axis, degree in CASES[name].mesh.items())
        predicted = statistics.median(one.predicted for one in rounds)
        measured = statistics.median(one.measured for one in rounds)
        each = " ".join(f"{100 * one.error:+.1f}" for one in rounds)
        print(
            f"| {plan.model} | {axes} | {plan.schedule} | {method} | {predicted:.3f} | "
            f"{measured:.3f} | {100 * _error(rounds):+.1f} % | {each} |"
        )
    sizes = sorted(abs(_error(rounds)) for rounds in found.values())
    print(f"\nmedian {100 * statistics.median(sizes):.1f} %, largest {100 * sizes[-1]:.1f} %")


def _error(rounds: Sequence[Round]) -> float:
    """The median of the rounds."""
    return statistics.median(one.error for one in rounds)


if __name__ == "__main__":
    main()
