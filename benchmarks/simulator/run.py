"""Does a step take as long as the simulator says, given what its instructions cost?

    python benchmarks/simulator/run.py [--schedules 1f1b ...] [--rounds 5] [--pause 0]

Two processes of one thread each run a GPT under every schedule, in turn. The costs come from steps
of one schedule alone, zb-v, which are not among those that are predicted: forward, backward for the
input and backward for the weights of each quarter of the model. Other schedules have the same
quarters, or halves that cost two quarters; a whole backward costs both of its parts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from measured import Found, Step, costs, merged, quiet, read
from rank import main as rank_main
from torch import nn

import parcompiler as pc
from parcompiler.instruction import Instruction
from parcompiler.models import gpt
from parcompiler.prices import simulate_lowered
from parcompiler.timeline import StageCost, Timeline

RANKS = 2
MICROBATCHES = 4
ROWS = 2  # of a micro-batch
CONFIG = gpt.Config(layers=8, heads=8, hidden=512, vocabulary=4096, sequence=256)
QUARTERS = [3, 2, 2, 3]  # blocks: the embedding and two layers, two, two, two and the head
HALVES = [5, 5]
STAGES = {
    "naive": HALVES,
    "gpipe": HALVES,
    "1f1b": HALVES,
    "zb-h1": HALVES,
    "interleaved": QUARTERS,
    "zb-v": QUARTERS,
    "v-half": QUARTERS,
    "search": QUARTERS,
}
CALIBRATION = "zb-v"
HEADER = (
    "| schedule | predicted (s) | measured (s) | error | idle, predicted | idle, measured | steps |"
)


def main() -> None:
    """Print the costs and the table."""
    options = _options()
    turns = (CALIBRATION, *options.schedules)
    programs, batch = _programs(dict.fromkeys(turns))
    found = _measured(programs, batch, turns, vars(options))
    calibration, *steps = found.steps
    quarters = costs(_kept(CALIBRATION, calibration))
    print(_costs(quarters, found))
    print(f"\n{HEADER}\n|{'---|' * (HEADER.count('|') - 1)}")
    for name, own in zip(options.schedules, steps, strict=True):
        print(_row(name, _predicted(programs[name], quarters, found), own))


def _options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--rounds", type=int, default=5, help="steps of each schedule (5)")
    help = "seconds before each step that are left to others on the machine (0)"
    parser.add_argument("--pause", type=float, default=0.0, help=help)
    options = parser.parse_args()
    if options.rounds < 1 or options.pause < 0:
        parser.error("--rounds must be at least 1, --pause at least 0")
    return options


def _programs(names: Mapping[str, None]) -> tuple[dict[str, pc.Program], dict[str, torch.Tensor]]:
    """The model compiled for each schedule, and a batch."""
    torch.manual_seed(0)
    tokens = torch.randint(CONFIG.vocabulary, (ROWS * MICROBATCHES, CONFIG.sequence + 1))
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    source: nn.Module | pc.Program = gpt.GPT(CONFIG)
    inputs: dict[str, torch.Tensor] | None = {key: rows[:ROWS] for key, rows in batch.items()}
    programs: dict[str, pc.Program] = {}
    for name in names:
        programs[name] = pc.compile(
            source,
            pc.Mesh(pipeline=RANKS, device="cpu"),
            inputs,
            schedule=name,
            virtual_stages=len(STAGES[name]) // RANKS,
            microbatches=MICROBATCHES,
            stages=STAGES[name],
            recompute="none",
            progress=False,
        )
        source, inputs = programs[name], None  # captured once
    return programs, batch


def _measured(
    programs: Mapping[str, pc.Program],
    batch: Mapping[str, torch.Tensor],
    turns: Sequence[str],
    options: Mapping[str, Any],
) -> Found:
    """Export the programs, run the processes, and gather what they found."""
    every = programs.values()
    sizes = {
        "messages": sorted({v.nbytes for p in every for v in p.lowered.values.values()}),
        "sums": sorted({0}.union(*(_sums(p).values() for p in every))),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for schedule, program in programs.items():
            program.export(folder / schedule)
        torch.save(dict(batch), folder / "batch.pt")
        arguments = (RANKS, name, turns, {**options, **sizes})
        multiprocessing.spawn(rank_main, arguments, nprocs=RANKS)
        return read(folder, RANKS)


def _sums(program: pc.Program) -> dict[str, int]:
    """The bytes of each gradient that is added up over ranks, by its name in the instructions."""
    lowered = program.lowered
    return {item.label: lowered.graph.by_name[item.name].nbytes for item in lowered.tied}


def _predicted(program: pc.Program, quarters: Sequence[StageCost], found: Found) -> Timeline:
    """The simulated step."""
    lowered = program.lowered
    each = len(quarters) // len(lowered.stages)
    stages = [merged(quarters[j * each : (j + 1) * each]) for j in range(len(lowered.stages))]

    sums = _sums(program)

    def collective(line: Instruction) -> float:  # SHARE_LOSS names no value
        return found.sums[sums.get(line.value or "", 0)]

    def message(value: str, *_: int) -> float:
        return found.messages[lowered.values[value].nbytes]

    return simulate_lowered(lowered, stages, message, collective_seconds=collective)


def _kept(name: str, steps: Sequence[Step]) -> Sequence[Step]:
    """The steps that nothing disturbed; all of them, and a warning, when there are none."""
    if not quiet(steps):
        print(f"every step of {name} was disturbed: the machine is busy", file=sys.stderr)
    return quiet(steps) or steps


def _costs(quarters: Sequence[StageCost], found: Found) -> str:
    """What was measured of single instructions, in milliseconds."""
    lines = [
        "| quarter | forward (ms) | backward, input (ms) | backward, weights (ms) |",
        "|---|---|---|---|",
    ]
    for j, cost in enumerate(quarters):
        parts = (cost.forward, cost.backward - cost.weight, cost.weight)
        lines.append(f"| {j} | {' | '.join(f'{1e3 * part:.1f}' for part in parts)} |")
    for what, seconds in (("message", found.messages), ("sum", found.sums)):
        sizes = ", ".join(f"{1e3 * s:.2f} ms for {nbytes} B" for nbytes, s in seconds.items())
        lines.append(f"\nA {what} takes {sizes}.")
    return "\n".join(lines)


def _row(name: str, timeline: Timeline, steps: Sequence[Step]) -> str:
    """One line of the table."""
    kept = _kept(name, steps)
    seconds = statistics.median(step.seconds for step in kept)
    bubble = statistics.median(step.bubble for step in kept)
    return (
        f"| {name} | {timeline.step_time:.3f} | {seconds:.3f} | "
        f"{100 * (timeline.step_time / seconds - 1):+.1f} % | "
        f"{100 * statistics.mean(timeline.bubble):.1f} % | {100 * bubble:.1f} % | "
        f"{len(quiet(steps))} of {len(steps)} |"
    )


if __name__ == "__main__":
    main()
