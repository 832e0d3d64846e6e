"""What does a step of Hugging Face Llama cost with its own operators, and with its kernels?

    python benchmarks/attention/run.py [--positions 1024] [--pairs 10] [--before FOLDER]

Two processes of one thread each run both programs (pipeline 2, 1F1B) in turn, step by step.
`--before` is a program that another tree exported by `--export FOLDER`: it takes the place of the
model's own operators.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from transformers import LlamaConfig, LlamaForCausalLM

import parcompiler as pc

RANKS, MICROBATCHES, ROWS, VOCABULARY = 2, 4, 1, 1024
WARM = 2  # pairs that are not counted
TOLERANCE = 1e-5  # float32, other orders of addition
TIMEOUT = timedelta(minutes=5)


def main() -> None:
    """Print the table, or export the default program."""
    options = _options()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, batch = _model(options.positions)
        torch.save(batch, folder / "batch.pt")
        program = _compiled(model, batch)
        if options.export:
            print(program.export(options.export))
            return
        program.export(folder / "after")
        before = options.before
        if before is None:
            before = _compiled(model, batch, exact=True).export(folder / "before")
        folders = (str(before), str(folder / "after"))
        multiprocessing.spawn(_rank, (name, folders, options.pairs), nprocs=RANKS)
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    print("| | before (ms) | after (ms) | ratio (quartiles) |\n|---|---|---|---|")
    for kind, combine in (("CPU time of all ranks", sum), ("wall time of the step", max)):
        pairs = [
            [combine(rank["pairs"][turn][side][kind] for rank in found) for side in (0, 1)]
            for turn in range(options.pairs)
        ]
        first, second = ([1e3 * pair[side] for pair in pairs] for side in (0, 1))
        low, middle, high = statistics.quantiles([b / a for a, b in pairs], n=4)
        times = f"{statistics.median(first):.0f} | {statistics.median(second):.0f}"
        print(f"| {kind} | {times} | {middle:.2f} ({low:.2f}-{high:.2f}) |")
    sent = [f"{before} -> {after}" for before, after in (rank["sent"] for rank in found)]
    print(f"\nBytes that a rank sends in a step: {', '.join(sent)}")


def _options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=10, help="pairs of steps (10)")
    parser.add_argument("--before", type=Path, help="a program that another tree exported")
    parser.add_argument("--export", type=Path, help="export the program of this tree, and end")
    return parser.parse_args()


def _model(positions: int) -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """Four layers, and the batch of a step."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=positions,
        use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(VOCABULARY, (MICROBATCHES * ROWS, positions))
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens.clone()}


def _compiled(model: LlamaForCausalLM, batch: dict[str, Any], **options: bool) -> pc.Program:
    """The program of both ranks."""
    inputs = {key: value[:ROWS] for key, value in batch.items()}
    return pc.compile(
        model, pc.Mesh(pipeline=RANKS, device="cpu"), inputs, microbatches=MICROBATCHES,
        schedule="1f1b", vocabulary="whole", stages="even", recompute="none", progress=False,
        **options,
    )  # fmt: skip


def _rank(rank: int, name: str, folders: tuple[str, str], pairs: int) -> None:
    """One process: both programs, in turn."""
    torch.set_num_threads(1)
    here = Path(name)
    store = dist.FileStore(str(here / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=TIMEOUT)
    batch = torch.load(here / "batch.pt")
    with pc.load(folders[0]).worker() as before, pc.load(folders[1]).worker() as after:
        steps = [lambda: before.step(batch), lambda: after.step(batch)]
        losses = [step().item() for step in steps]
        if abs(losses[0] / losses[1] - 1) > TOLERANCE:
            message = f"the losses differ: {losses}"
            raise RuntimeError(message)
        measured = [_pair(steps, turn) for turn in range(-WARM, pairs)][WARM:]
        sent = [_sent(worker) for worker in (before, after)]
        dist.barrier()
    (here / f"{rank}.json").write_text(json.dumps({"pairs": measured, "sent": sent}))
    dist.destroy_process_group()


def _pair(steps: list[Callable[[], Any]], turn: int) -> list[dict[str, float]]:
    """A step of each; who begins alternates."""
    first = turn % 2
    costs = {side: _cost(steps[side]) for side in (first, 1 - first)}
    return [costs[0], costs[1]]


def _cost(step: Callable[[], Any]) -> dict[str, float]:
    """Seconds of one step that both ranks begin together."""
    gc.collect(0)
    dist.barrier()
    begin = time.process_time(), time.perf_counter()
    step()
    end = time.process_time(), time.perf_counter()
    return {"CPU time of all ranks": end[0] - begin[0], "wall time of the step": end[1] - begin[1]}


def _sent(worker: Any) -> int:
    """Bytes of the values and gradients that a rank sends in a step."""
    program = worker.program
    sent = [line for line in program.instructions if line.kind.name == "SEND"]
    values = [program.values[line.value.removesuffix(".grad")] for line in sent]
    return sum(torch.Size(value.shape).numel() * value.dtype.itemsize for value in values)


if __name__ == "__main__":
    main()
