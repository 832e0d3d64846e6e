"""What do the two parts of a split backward cost, beside one backward?

    python benchmarks/split_backward/run.py [--rounds 30]

One stage holds the whole model. In every round each variant runs once, in turn, on one thread:
a forward and BACKWARD as 1f1b emits them, a forward and both parts as zb-h1 does. Times are of this
process's CPU.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from parcompiler.capture import capture
from parcompiler.capture.blocks import cut
from parcompiler.capture.clean import simplify
from parcompiler.codegen.modules import stage_classes
from parcompiler.codegen.rank import rank_program
from parcompiler.graph import Graph
from parcompiler.lower import lower
from parcompiler.mesh import Mesh
from parcompiler.models import gpt, llama
from parcompiler.options import Options
from parcompiler.plan import Plan, Shape, StageChoice
from parcompiler.problem import Problem
from parcompiler.runtime import Stage
from parcompiler.runtime.batch import microbatches
from parcompiler.runtime.deferred import Deferral, finish
from parcompiler.runtime.state import share_tensors
from parcompiler.verification.batches import random_batch

Model = tuple[nn.Module, Mapping[str, torch.Tensor]]
COLUMNS = (
    *("model", "hidden", "rows × tokens", "F (ms)", "B (ms)", "I (ms)", "W (ms)"),
    *("F of zb-h1 / F", "(I + W) / B", "W / (I + W)", "predicted"),
)


def tokens(rows: int, length: int) -> torch.Tensor:
    """Words of a vocabulary of 512."""
    return torch.randint(512, (rows, length), generator=torch.Generator().manual_seed(0))


def own_gpt(hidden: int, rows: int, length: int) -> Model:
    """GPT of this repository; linear layers with biases."""
    config = gpt.Config(4, hidden // 32, hidden, vocabulary=512, sequence=length)
    return gpt.GPT(config), {"tokens": tokens(rows, length), "labels": tokens(rows, length)}


def own_llama(hidden: int, rows: int, length: int) -> Model:
    """Llama of this repository; linear layers without biases."""
    heads = hidden // 32
    config = llama.Config(
        layers=4, heads=heads, kv_heads=heads // 2, hidden=hidden, vocabulary=512, sequence=length
    )
    return llama.Llama(config), {"tokens": tokens(rows, length), "labels": tokens(rows, length)}


def hugging_face(hidden: int, rows: int, length: int) -> Model:
    """GPT-2 of Hugging Face; addmm."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_embd": hidden, "n_layer": 4, "n_head": hidden // 32}
    chance: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends: dict[str, Any] = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(**sizes, **chance, **ends, vocab_size=512, n_positions=length)
    given = {"input_ids": tokens(rows, length), "labels": tokens(rows, length)}
    return GPT2LMHeadModel(config), given


MODELS: Mapping[str, Callable[[int, int, int], Model]] = {
    "gpt": own_gpt,
    "llama": own_llama,
    "GPT-2 (Hugging Face)": hugging_face,
}
SIZES = ((64, 2, 32), (256, 4, 128), (512, 4, 256))


def emitted(graph: Graph, schedule: str) -> tuple[Stage, dict[str, torch.Tensor]]:
    """The one stage of a model as a schedule emits it, and a micro-batch for it."""
    parts = cut(graph, 1)
    stages = (StageChoice(tuple(block.name for block in parts.blocks), 0),)
    plan = Plan(graph.name, "", Shape(), 1, schedule=schedule, granularity=1, stages=stages)
    lowered = lower(graph, plan, parts)
    stage = stage_classes(lowered, 0, "cpu")[0]()
    for name, tensor in share_tensors({0: stage}).items():
        tensor.detach().copy_(graph.tensors[name])
    program = rank_program(lowered, 0, "cpu")
    (piece,) = microbatches(program, program.in_form(random_batch(graph, 1, seed=0)))
    return stage, piece


def whole(stage: Stage, piece: Mapping[str, torch.Tensor]) -> tuple[float, ...]:
    """CPU seconds of a forward and of one backward."""
    start = time.process_time()
    loss = stage(**piece)
    between = time.process_time()
    loss.backward()
    return between - start, time.process_time() - between


def split(stage: Stage, piece: Mapping[str, torch.Tensor]) -> tuple[float, ...]:
    """CPU seconds of a forward and of both parts of a backward."""
    deferral = Deferral()
    start = time.process_time()
    with deferral.forward():
        loss = stage(**piece)
    between = time.process_time()
    with deferral.collect() as products:
        loss.backward()
    middle = time.process_time()
    finish(products)
    return between - start, middle - between, time.process_time() - middle


def predicted(graph: Graph) -> float:
    """The part of a backward that the cost model expects to be left for later."""
    priced = Problem(graph, Mesh(), Options(microbatches=1)).priced(1)
    return sum(priced.weight) / sum(priced.backward)


def row(name: str, size: tuple[int, int, int], rounds: int) -> str:
    """One line of the table."""
    torch.manual_seed(0)
    hidden, rows, length = size
    graph = simplify(capture(*MODELS[name](*size)))
    plain, deferring = emitted(graph, "1f1b"), emitted(graph, "zb-h1")
    for _ in range(2):  # gradients are there from now on, as from the second micro-batch on
        whole(*plain), split(*deferring)
    found = [(*whole(*plain), *split(*deferring)) for _ in range(rounds)]
    f, b, _, i, w = (1000 * statistics.median(column) for column in zip(*found, strict=True))
    forward = statistics.median(again / f for f, _, again, *_ in found)
    ratio = statistics.median((i + w) / b for _, b, _, i, w in found)
    share = statistics.median(w / (i + w) for *_, i, w in found)
    return (
        f"| {name} | {hidden} | {rows} × {length} | {f:.1f} | {b:.1f} | {i:.1f} | {w:.1f} | "
        f"{forward:.2f} | {ratio:.2f} | {share:.2f} | {predicted(graph):.2f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|{'---|' * len(COLUMNS)}")
    for size in SIZES:
        for name in MODELS:
            print(row(name, size, options.rounds), flush=True)


if __name__ == "__main__":
    main()
