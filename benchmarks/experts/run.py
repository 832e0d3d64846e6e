"""Does the cost model predict published training runs with expert ranks?

    python benchmarks/experts/run.py [--only NAME ...]

Plans each model on as many devices as it was trained on, and prints the tokens that a device is
predicted to take in a second beside those that were published. It needs no GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

import parcompiler as pc


@dataclass(frozen=True, slots=True)
class Run:
    """A model of transformers in its default, published configuration: degrees, the rows of a
    micro-batch and how many of them a data rank takes, and the tokens a second of a device."""

    name: str
    model: str
    degrees: dict[str, int]
    batch: tuple[int, int]
    published: float
    options: dict[str, Any] = field(default_factory=dict)
    sequence: int = 4096


# Of 468 TFLOP/s, with 6 FLOPs for each of 12.75 B active parameters but the embedding, and
# 12 x layers x hidden x sequence for scores, all of which Megatron-LM counts.
MIXTRAL = 468e12 / (6 * 12.75e9 + 12 * 32 * 4096 * 4096)
DEEPSEEK = 1e12 / (180e3 * 3600)  # of 180,000 hours of devices for each trillion tokens
RUNS = (
    Run(
        "Mixtral 8x7B", "Mixtral", {"pipeline": 4, "data": 16, "expert": 8}, (1, 16), MIXTRAL,
        {"schedule": "interleaved", "virtual_stages": 8},
    ),
    Run("gpt-oss 120B", "GptOss", {"pipeline": 4, "data": 16, "expert": 8}, (1, 32), 5630),
    Run(
        "DeepSeek-V3", "DeepseekV3", {"pipeline": 16, "data": 128, "expert": 64}, (1, 120), DEEPSEEK
    ),
    Run(
        "DeepSeek-V3, expert 8", "DeepseekV3", {"pipeline": 16, "data": 128, "expert": 8},
        (1, 120), DEEPSEEK,
    ),
)  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help="names of rows")
    only = parser.parse_args().only
    print("| model | H100 | degrees | plan | published | predicted | ratio | TFLOP/s | CPU s |")
    print("|---|---:|---|---|---:|---:|---:|---:|---:|")
    for run in RUNS:
        if not only or run.name in only:
            print(_row(run), flush=True)


def _row(run: Run) -> str:
    """One line of the table."""
    rows, microbatches = run.batch
    tokens = torch.zeros(rows, run.sequence, dtype=torch.long)
    mesh, begin = pc.Mesh(**run.degrees, device="h100"), time.process_time()
    program = pc.compile(
        _model(run.model), mesh, {"input_ids": tokens, "labels": tokens},
        microbatches=microbatches, precision="bf16", vocabulary="whole", **run.options,
    )  # fmt: skip
    seconds, plan, step = time.process_time() - begin, program.plan, program.report().step
    taken = tokens.numel() * microbatches * mesh.replicas / mesh.size / step.seconds
    degrees = ", ".join(f"{axis} {degree}" for axis, degree in run.degrees.items())
    stages = f" of {plan.virtual_stages} stages" if plan.virtual_stages > 1 else ""
    blocks = sum(len(stage.blocks) for stage in plan.stages or ())
    choices = f"{plan.schedule}{stages}, zero {plan.zero}, {len(plan.recompute or ())} of {blocks}"
    spared = "offloaded" if plan.offload else "recomputed"
    flops = step.mfu * mesh.hardware.peak(torch.bfloat16) / 1e12
    cells = run.name, f"{mesh.size:,}", degrees, f"{choices} blocks {spared}"
    figures = run.published, taken
    return (
        f"| {' | '.join(cells)} | {' | '.join(f'{x:,.0f}' for x in figures)} | "
        f"{taken / run.published:.2f} | {flops:.0f} | {seconds:.0f} |"
    )


def _model(name: str) -> torch.nn.Module:
    """A model of transformers, without memory for its weights."""
    config: Callable[..., Any] = getattr(transformers, f"{name}Config")
    with torch.device("meta"):
        made: torch.nn.Module = getattr(transformers, f"{name}ForCausalLM")(config(use_cache=False))
    return made.train()


if __name__ == "__main__":
    main()
