"""How long are the steps of 40 plans, and how long does planning them take?

    python benchmarks/plans/measure.py --save before.json          (in one tree)
    python benchmarks/plans/measure.py --against before.json       (in another)
    python benchmarks/plans/measure.py --only t5                   (problems with this in the name)

Each model is captured once and every problem is then compiled from the captured graph. Seconds of
planning are those of the processor, because other programs use the machine too; the memory of a
device is written in the list, so that two trees are given the same problems.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

import parcompiler as pc
from parcompiler.models import gpt, llama, moe, resnet, t5

Made = tuple[torch.nn.Module, dict[str, torch.Tensor]]


class Problem(NamedTuple):
    """A model on a mesh of devices with so many MiB of memory each."""

    model: str
    pipeline: int
    tensor: int
    microbatches: int
    schedule: str
    memory: int
    slower: bool = False
    """Whether every other rank of the pipeline is an A100."""

    @property
    def name(self) -> str:
        """What the table calls it."""
        mesh = f"{self.pipeline} x {self.tensor}{' unequal' if self.slower else ''}"
        memory = f"{self.memory / 2**10:.1f} GiB"
        return f"{self.model}, {mesh}, {self.microbatches}, {self.schedule}, {memory}"


class Figures(NamedTuple):
    """Seconds of a step, None where the problem was refused, and seconds of planning it."""

    step: float | None
    planning: float


def tokens(rows: int, length: int, *names: str) -> dict[str, torch.Tensor]:
    """Tensors of tokens."""
    return {name: torch.zeros(rows, length, dtype=torch.long) for name in names}


def gpt_22() -> Made:
    """A GPT whose 22 layers few numbers of ranks divide, with a large vocabulary."""
    config = dataclasses.replace(gpt.PRESETS["1.3b"], layers=22, vocabulary=128000)
    return gpt.GPT(config), tokens(1, 2048, "tokens", "labels")


def gpt_96() -> Made:
    """The GPT of 175 billion parameters."""
    return gpt.GPT(gpt.PRESETS["175b"]), tokens(1, 2048, "tokens", "labels")


def llama_8b() -> Made:
    """Llama 3, whose vocabulary weighs as much as two of its layers."""
    return llama.Llama(llama.PRESETS["3-8b"]), tokens(1, 8192, "tokens", "labels")


def t5_small() -> Made:
    """An encoder and a decoder of six layers each, and one row."""
    return t5.T5(t5.PRESETS["small"]), tokens(1, 128, "tokens", "decoder_tokens", "labels")


def t5_large() -> Made:
    """An encoder and a decoder of 24 layers each, and four rows."""
    return t5.T5(t5.PRESETS["large"]), tokens(4, 512, "tokens", "decoder_tokens", "labels")


def resnet_101() -> Made:
    """Blocks that differ in time and bytes."""
    labels, images = torch.zeros(32, dtype=torch.long), torch.zeros(32, 3, 224, 224)
    return resnet.ResNet(resnet.PRESETS["resnet101"]), {"images": images, "labels": labels}


def moe_12() -> Made:
    """Layers with and without experts in turn."""
    config = moe.Config(12, 12, 768, vocabulary=50257, sequence=1024, experts=16, every=2)
    return moe.MoE(config), tokens(1, 1024, "tokens", "labels")


MODELS: dict[str, Callable[[], Made]] = {
    "gpt-22": gpt_22,
    "gpt-96": gpt_96,
    "llama-8b": llama_8b,
    "t5-small": t5_small,
    "t5-large": t5_large,
    "resnet-101": resnet_101,
    "moe-12": moe_12,
}
PROBLEMS = (
    Problem("gpt-22", 4, 1, 16, "1f1b", 9751),
    Problem("gpt-22", 4, 1, 16, "interleaved", 81920),
    Problem("gpt-22", 4, 1, 16, "interleaved", 11410),
    Problem("gpt-22", 4, 1, 16, "zb-v", 10347),
    Problem("gpt-22", 4, 1, 16, "auto", 81920),
    Problem("gpt-22", 4, 1, 16, "auto", 10347),
    Problem("gpt-22", 8, 1, 32, "interleaved", 10712),
    Problem("gpt-22", 8, 1, 32, "auto", 81920),
    Problem("gpt-22", 8, 1, 32, "auto", 11853),
    Problem("gpt-96", 16, 8, 64, "1f1b", 48203),
    Problem("gpt-96", 16, 8, 64, "v-half", 34297),
    Problem("gpt-96", 16, 8, 64, "auto", 81920),
    Problem("gpt-96", 16, 8, 64, "auto", 57603),
    Problem("llama-8b", 8, 2, 16, "interleaved", 81920),
    Problem("llama-8b", 8, 2, 16, "interleaved", 65536),
    Problem("llama-8b", 8, 2, 16, "auto", 81920),
    Problem("llama-8b", 8, 2, 16, "auto", 65536),
    Problem("t5-small", 4, 1, 16, "1f1b", 419),
    Problem("t5-small", 4, 1, 16, "interleaved", 81920),
    Problem("t5-small", 4, 1, 16, "interleaved", 302),
    Problem("t5-small", 8, 1, 16, "interleaved", 81920),
    Problem("t5-small", 8, 1, 16, "interleaved", 234),
    Problem("t5-large", 4, 1, 16, "interleaved", 81920),
    Problem("t5-large", 4, 1, 16, "interleaved", 28842),
    Problem("t5-large", 4, 1, 16, "zb-v", 21081),
    Problem("t5-large", 8, 1, 32, "interleaved", 81920),
    Problem("t5-large", 8, 1, 32, "interleaved", 27198),
    Problem("t5-large", 8, 1, 32, "auto", 81920),
    Problem("t5-large", 8, 1, 32, "auto", 33903),
    Problem("resnet-101", 4, 1, 8, "1f1b", 6525),
    Problem("resnet-101", 4, 1, 8, "interleaved", 81920),
    Problem("resnet-101", 4, 1, 8, "interleaved", 7610),
    Problem("resnet-101", 4, 1, 8, "auto", 7610),
    Problem("moe-12", 4, 1, 16, "interleaved", 81920),
    Problem("moe-12", 4, 1, 16, "interleaved", 3839),
    Problem("moe-12", 4, 1, 16, "auto", 3548),
    Problem("gpt-22", 4, 1, 16, "1f1b", 81920, slower=True),
    Problem("gpt-22", 4, 1, 16, "zb-v", 81920, slower=True),
    Problem("t5-large", 4, 1, 16, "interleaved", 81920, slower=True),
    Problem("llama-8b", 8, 2, 16, "auto", 81920, slower=True),
)


@cache
def captured(model: str) -> pc.Program:
    """A model without parameters, captured."""
    with torch.device("meta"):
        module, inputs = MODELS[model]()
    roomy = dataclasses.replace(pc.Mesh(device="h100").hardware, memory=2**50)
    return pc.compile(module, pc.Mesh(device=roomy), inputs, schedule="1f1b", progress=False)


def devices(problem: Problem) -> tuple[pc.Device, ...]:
    """The device at each pipeline coordinate."""
    names = ["h100", "a100-80g" if problem.slower else "h100"]
    pair = [
        dataclasses.replace(pc.Mesh(device=name).hardware, memory=problem.memory * 2**20)
        for name in names
    ]
    return tuple(pair[rank % 2] for rank in range(problem.pipeline))


def solved(problem: Problem) -> Figures:
    """The step of a problem, and what planning it takes."""
    model, found = captured(problem.model), devices(problem)
    mesh = pc.Mesh(problem.pipeline, problem.tensor, device=found if problem.slower else found[0])
    schedule, microbatches, step = problem.schedule, problem.microbatches, None
    begin = time.process_time()
    with suppress(pc.PlanError):
        program = pc.compile(
            model, mesh, microbatches=microbatches, schedule=schedule, progress=False
        )
        step = program.simulate().step_time
    return Figures(step, time.process_time() - begin)


def main() -> None:
    """Print the table, beside the figures of another tree where these are named."""
    options = arguments()
    saved = json.loads(options.against.read_text()) if options.against else {}
    known = {name: Figures(*figures) for name, figures in saved.items()}
    found: dict[str, Figures] = {}
    print("| problem | step (ms) | than before | planning (s) | than before |")
    print("|---|---|---|---|---|")
    for problem in PROBLEMS:
        if options.only in problem.name:
            found[problem.name] = solved(problem)
            print(row(problem.name, found[problem.name], known.get(problem.name)), flush=True)
    print(f"\nplanning: {sum(figures.planning for figures in found.values()):.1f} s in all", end="")
    if both := [(known[name], found[name]) for name in found if name in known]:
        print(f", before {sum(before.planning for before, _ in both):.1f} s", end="")
        ratios = [after.step / before.step for before, after in both if before.step and after.step]
        print(f"; steps: {statistics.fmean(ratios):.4f} of before in the mean", end="")
        print(f", {min(ratios):.4f} to {max(ratios):.4f}", end="")
    print()
    if options.save:
        options.save.write_text(json.dumps(found, indent=1))


def row(name: str, now: Figures, before: Figures | None) -> str:
    """A line of the table."""
    step = "refused" if now.step is None else f"{1e3 * now.step:.2f}"
    old = before or Figures(None, 0.0)
    steps = f"{now.step / old.step:.4f}" if now.step and old.step else ""
    if before and (now.step is None) != (old.step is None):
        steps = "was refused" if old.step is None else "was not refused"
    planning = f"{now.planning / old.planning:.2f}" if old.planning else ""
    return f"| {name} | {step} | {steps} | {now.planning:.2f} | {planning} |"


def arguments() -> argparse.Namespace:
    """What is typed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="problems with this in the name")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--against", type=Path, metavar="FILE", help="figures of another tree")
    return parser.parse_args()


if __name__ == "__main__":
    main()
