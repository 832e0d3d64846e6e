"""How long does a plan for thousands of GPUs take, beside `torch.export` alone?

    python benchmarks/planning/measure.py [--runs 3] [--only llama-405b] [--optimizer sgd]

Each run is a process of its own: export alone, then everything that `compile` does, capture among
it, then export again, and at last the same captured model for a second mesh. Seconds are those of
the clock and those of the processor: on a machine that others use, the second say more.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import parcompiler as pc
from parcompiler.capture.loss import WithLoss
from parcompiler.models import gpt

Made = tuple[torch.nn.Module, dict[str, Any]]
LARGE = LlamaConfig(
    num_hidden_layers=126, hidden_size=16384, intermediate_size=53248, num_attention_heads=128,
    num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
    tie_word_embeddings=False,
)  # fmt: skip
SMALL = LlamaConfig(
    num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
    num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
    tie_word_embeddings=False,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, the mesh that it is compiled for, and the mesh after that."""

    make: Callable[[], Made]
    first: pc.Mesh
    second: pc.Mesh
    microbatches: int


def llama(config: LlamaConfig) -> Made:
    """A model of `transformers` without parameters, and a row of 8,192 tokens."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tokens = torch.zeros(1, 8192, dtype=torch.long, device="meta")
    return model, {"input_ids": tokens, "labels": tokens.clone(), "use_cache": False}


def gpt3() -> Made:
    """GPT-3 175B without parameters, and a row of 2,048 tokens."""
    with torch.device("meta"):
        model = gpt.GPT(gpt.PRESETS["175b"])
    tokens = torch.zeros(1, 2048, dtype=torch.long, device="meta")
    return model, {"tokens": tokens, "labels": tokens.clone()}


CASES = {
    "llama-405b": Case(
        lambda: llama(LARGE), pc.Mesh(16, 8, 128, "h100"), pc.Mesh(32, 8, 64, "h100"), 16
    ),
    "gpt-175b": Case(gpt3, pc.Mesh(16, 8, 8, "h100"), pc.Mesh(8, 8, 16, "h100"), 64),
    "llama-8b": Case(lambda: llama(SMALL), pc.Mesh(1, 8, 8, "h100"), pc.Mesh(2, 8, 4, "h100"), 8),
}


def once(case: Case, options: dict[str, Any]) -> dict[str, float]:
    """Seconds of each part, by the clock and of the processor, and the peak memory in GiB."""
    found: dict[str, float] = {}
    model, inputs = case.make()

    def timed(name: str, run: Callable[[], Any]) -> Any:
        clock, processor = time.perf_counter(), time.process_time()
        result = run()
        found[f"{name} wall"] = time.perf_counter() - clock
        found[f"{name} cpu"] = time.process_time() - processor
        return result

    def export() -> object:
        return torch.export.export(WithLoss(model, None), (), inputs, strict=False)

    given = {"microbatches": case.microbatches, "progress": False, **options}
    compile = pc.compile  # loads the compiler: torch is there before its export is timed, too
    timed("before", export)
    program = timed("compile", lambda: compile(model, case.first, inputs, **given))
    timed("after", export)
    timed("second", lambda: compile(program, case.second, **given))
    for unit in ("wall", "cpu"):
        found[f"export {unit}"] = (found[f"before {unit}"] + found[f"after {unit}"]) / 2
        found[f"ratio {unit}"] = found[f"compile {unit}"] / found[f"export {unit}"]
    found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return found


def main() -> None:
    """Print the table; or, with --once, one measurement as JSON."""
    options = arguments()
    precision = None if options.precision == "none" else options.precision
    if options.once:
        given = {"precision": precision, "optimizer": options.optimizer}
        print(json.dumps(once(CASES[options.once], given)))
        return
    print("| model | export alone (s) | compile (s) | ratio | second mesh (s) | peak RSS (GiB) |")
    print("|---|---|---|---|---|---|")
    for name in [options.only] if options.only else CASES:
        rows = [start(name, options) for _ in range(options.runs)]
        middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        parts = (pair(middle, part) for part in ("export", "compile", "ratio", "second"))
        print(f"| {name} | {' | '.join(parts)} | {middle['memory']:.2f} |", flush=True)


def pair(found: dict[str, float], part: str) -> str:
    """What the processor took, and in brackets the clock."""
    return f"{found[f'{part} cpu']:.2f} ({found[f'{part} wall']:.2f})"


def start(name: str, options: argparse.Namespace) -> dict[str, float]:
    """One measurement in a new process."""
    same = ["--precision", options.precision, "--optimizer", options.optimizer]
    command = [sys.executable, __file__, "--once", name, *same]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(text.splitlines()[-1])
    return found


def arguments() -> argparse.Namespace:
    """What is typed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=list(CASES))
    parser.add_argument("--precision", default="bf16", help="as of compile, or none")
    parser.add_argument("--optimizer", default="adamw", help="as of compile")
    parser.add_argument("--once", choices=list(CASES), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
