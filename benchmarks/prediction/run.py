"""Does a step take as long as `compile(..., costs="measured")` predicts?

    python benchmarks/prediction/run.py [--cases "gpt 1f1b" ...] [--rounds 5] [--pause 0]

Twelve programs of models, meshes and schedules, each for two processes of one thread. What is
predicted comes from the templates alone, which are timed before any of them starts, and from what
messages and collectives take by `parcompiler calibrate`. Steps of all programs take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from cases import CASES, Case
from rank import LEAST, Step, read, stepping

import parcompiler as pc

RANKS = 2
HEADER = "| model | mesh | schedule | vocabulary | predicted (s) | measured (s) | error | steps |"


def main() -> None:
    """Print the table."""
    options = _options()
    torch.set_num_threads(1)
    names = options.cases or list(CASES)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        device = _device(folder)
        programs = {name: _compiled(CASES[name], device) for name in names}
        predicted = {name: program.simulate().step_time for name, program in programs.items()}
        for number, (case, program) in enumerate(programs.items()):
            program.export(folder / str(number))
            torch.save(CASES[case].batch(), folder / f"{number}.pt")
        arguments = (RANKS, str(folder), len(names), options.rounds, options.pause)
        multiprocessing.spawn(stepping, arguments, nprocs=RANKS)
        measured = read(folder, RANKS, len(names))
    _print(programs, predicted, dict(zip(names, measured, strict=True)))


def _options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, help="all of them")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each program (5)")
    help = "seconds before each step that are left to others on the machine (0)"
    parser.add_argument("--pause", type=float, default=0.0, help=help)
    options = parser.parse_args()
    if options.rounds < 1 or options.pause < 0:
        parser.error("--rounds must be at least 1, --pause at least 0")
    return options


def _device(folder: Path) -> Path:
    """The figures of this machine, as `parcompiler calibrate` finds them on two processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    path = folder / "cpu.json"
    calibrate = ["-m", "parcompiler", "calibrate", "--output", str(path), "--seconds", "0.05"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*torchrun, *calibrate], check=True, capture_output=True, env=environment)
    return path


def _compiled(case: Case, device: Path) -> pc.Program:
    """The program of a case, from what its templates take here."""
    mesh = pc.Mesh(**case.mesh, device=str(device))
    model, inputs = case.model(), case.inputs()
    return pc.compile(model, mesh, inputs, costs="measured", progress=False, **case.options)


def _print(
    programs: dict[str, pc.Program], predicted: dict[str, float], found: dict[str, Sequence[Step]]
) -> None:
    """The table, and its median and largest error."""
    print(f"{HEADER}\n|{'---|' * (HEADER.count('|') - 1)}")
    errors = []
    for name, steps in found.items():
        plan: Any = programs[name].plan
        quiet = [step for step in steps if step.share >= LEAST]
        seconds = statistics.median(step.seconds for step in quiet or steps)
        errors.append(predicted[name] / seconds - 1)
        method = plan.vocabulary.method if plan.vocabulary else "whole"
        axes = " ".join(f"{axis} {degree}" for axis, degree in CASES[name].mesh.items())
        print(
            f"| {plan.model} | {axes} | {plan.schedule} | {method} | {predicted[name]:.3f} | "
            f"{seconds:.3f} | {100 * errors[-1]:+.1f} % | {len(quiet)} of {len(steps)} |"
        )
    sizes = sorted(map(abs, errors))
    print(f"\nmedian {100 * statistics.median(sizes):.1f} %, largest {100 * sizes[-1]:.1f} %")


if __name__ == "__main__":
    main()
