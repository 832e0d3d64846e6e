"""Is a plan that the compiler chooses ever slower than the one that people chose?

    python benchmarks/choices/run.py [--only NAME ...]

Each model is planned for its whole cluster, and for the plan of experts on the same devices; both
are predicted by the same model. It needs no GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import parcompiler as pc
from parcompiler.models import bert, dlrm, gpt, llama, resnet, t5
from parcompiler.plan import Plan

Made = tuple[torch.nn.Module, dict[str, torch.Tensor]]
A100, H100 = "a100-80g", "h100"
FSDP = {"zero": 3}
SGD = {"optimizer": "sgd"}
MEGATRON = {"vocabulary": "whole", "stages": "even"}


@dataclass(frozen=True, slots=True)
class Problem:
    """A model on a cluster with the `batch` micro-batches of a step, and what `experts` do: the
    degrees of pipeline, tensor and data, and options."""

    make: Callable[[], Made]
    device: str
    nodes: int
    batch: int
    degrees: tuple[int, int, int]
    experts: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    options: dict[str, Any] = field(default_factory=lambda: {"precision": "bf16"})


def tokens(rows: int, sequence: int) -> dict[str, torch.Tensor]:
    """A micro-batch of text."""
    names = "tokens", "labels"
    return {name: torch.zeros(rows, sequence, dtype=torch.long) for name in names}


def gpt_of(layers: int, hidden: int, heads: int) -> Made:
    """A GPT of Megatron-LM's papers, and one row."""
    sizes = gpt.Config(layers, heads, hidden, vocabulary=51200, sequence=2048, tied=True)
    return gpt.GPT(sizes), tokens(1, 2048)


def llama_of(name: str) -> Made:
    """Llama 3, and one row of 8,192 tokens."""
    return llama.Llama(llama.PRESETS[name]), tokens(1, 8192)


def mixtral() -> Made:
    """Mixtral 8x7B as transformers has it, and one row of 4,096 tokens."""
    row = torch.zeros(1, 4096, dtype=torch.long)
    return MixtralForCausalLM(MixtralConfig(use_cache=False)), {"input_ids": row, "labels": row}


def t5_11b() -> Made:
    """T5-11B, and two rows of 512 tokens."""
    row = torch.zeros(2, 512, dtype=torch.long)
    return t5.T5(t5.PRESETS["11b"]), {"tokens": row, "decoder_tokens": row, "labels": row}


def bert_large() -> Made:
    """BERT-large, and 32 rows of 512 tokens."""
    return bert.BERT(bert.PRESETS["large"]), tokens(32, 512)


def resnet_50() -> Made:
    """ResNet-50, and 256 images."""
    images = torch.empty(256, 3, 224, 224)
    labels = torch.zeros(256, dtype=torch.long)
    return resnet.ResNet(resnet.PRESETS["resnet50"]), {"images": images, "labels": labels}


def dlrm_mlperf() -> Made:
    """The DLRM of MLPerf, and the 65,536 rows of a step."""
    config = dlrm.PRESETS["mlperf"]
    categories = torch.zeros(65536, len(config.tables), dtype=torch.long)
    numbers, labels = torch.zeros(65536, config.numbers), torch.zeros(65536)
    return dlrm.DLRM(config), {"numbers": numbers, "categories": categories, "labels": labels}


PROBLEMS = {
    "GPT 1T": Problem(lambda: gpt_of(128, 25600, 160), A100, 384, 3072, (64, 8, 6),
        {**MEGATRON, "schedule": "interleaved"}, "Narayanan et al. 2021, table 1"),
    "Llama 405B": Problem(lambda: llama_of("3.1-405b"), H100, 2048, 2048, (16, 8, 128),
        {**MEGATRON, "schedule": "interleaved", "virtual_stages": 8, "zero": 1},
        "Llama 3, table 4"),
    "GPT-3 175B": Problem(lambda: gpt_of(96, 12288, 96), A100, 96, 1536, (12, 8, 8),
        {**MEGATRON, "schedule": "interleaved"}, "Narayanan et al. 2021, table 2"),
    "Llama 70B": Problem(lambda: llama_of("3-70b"), H100, 8, 128, (4, 4, 4),
        {**MEGATRON, "schedule": "interleaved", "virtual_stages": 5},
        "a usual division in three"),
    "Llama 8B, 8": Problem(lambda: llama_of("3-8b"), H100, 1, 128, (1, 1, 8), FSDP,
        "torchtitan: FSDP"),
    "Llama 8B, 64": Problem(lambda: llama_of("3-8b"), H100, 8, 256, (1, 1, 64), FSDP,
        "torchtitan: FSDP"),
    "Mixtral 8x7B": Problem(mixtral, H100, 8, 256, (4, 4, 4), MEGATRON,
        "a usual division in three"),
    "T5-11B": Problem(t5_11b, A100, 8, 512, (1, 8, 8), {"zero": 1},
        "tensor ranks in a node"),
    "BERT-large": Problem(bert_large, A100, 1, 1024, (1, 1, 8), {"zero": 0},
        "DeepLearningExamples: data ranks"),
    "ResNet-50": Problem(resnet_50, A100, 1, 8, (1, 1, 8), {"zero": 0},
        "DeepLearningExamples: data ranks"),
    "DLRM": Problem(dlrm_mlperf, A100, 1, 1, (1, 8, 1),
        source="MLPerf: tables in pieces, layers on rows of the batch", options=SGD),
    "DLRM, 16": Problem(dlrm_mlperf, A100, 2, 1, (1, 16, 1),
        source="the same, over two nodes", options=SGD),
}  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], choices=[*PROBLEMS])
    only = parser.parse_args().only
    print("| model | devices | chosen | step (s) | experts | step (s) | ratio | CPU s |")
    print("|---|---|---|---:|---|---:|---:|---:|")
    for name, problem in PROBLEMS.items():
        if not only or name in only:
            print(row(name, problem), flush=True)


def row(name: str, problem: Problem) -> str:
    """One line of the table."""
    with torch.device("meta"):
        model, inputs = problem.make()
    begin = time.process_time()
    cluster = pc.Cluster(problem.nodes, 8, problem.device)
    given = {"progress": False, **problem.options}
    chosen = pc.compile(model, cluster, inputs, microbatches=problem.batch, **given)
    taken = time.process_time() - begin
    mesh = pc.Mesh(*problem.degrees, device=problem.device)
    count = problem.batch // mesh.data
    given = {**given, **problem.experts}
    try:
        theirs = pc.compile(chosen, mesh, microbatches=count, **given)
        experts = _in_words(theirs.plan), theirs.simulate().step_time
    except pc.InfeasibleError:
        experts = f"{_degrees(*problem.degrees)}: does not fit", float("nan")
    step = chosen.simulate().step_time
    cells = (
        name, f"{cluster.size} × {problem.device}", _in_words(chosen.plan), f"{step:.3g}",
        f"{experts[0]} ({problem.source})", f"{experts[1]:.3g}", f"{step / experts[1]:.2f}",
        f"{taken:.0f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _degrees(pipeline: int, tensor: int, data: int) -> str:
    return f"{pipeline} × {tensor} × {data}"


def _in_words(plan: Plan) -> str:
    """Degrees of the axes, and what else makes the step."""
    mesh = plan.mesh
    words = [_degrees(mesh.pipeline, mesh.tensor, mesh.data)]
    more = {"context": mesh.context, "expert": mesh.expert}
    words += [f"{axis} {degree}" for axis, degree in more.items() if degree > 1]
    if plan.mesh.pipeline > 1:
        stages = f" of {plan.virtual_stages} stages" if plan.virtual_stages > 1 else ""
        words.append(f"{plan.schedule}{stages}")
    if plan.vocabulary and plan.vocabulary.spread:
        words.append(f"vocabulary {plan.vocabulary.method}")
    if plan.zero:
        words.append(f"zero {plan.zero}")
    if plan.recompute:
        words.append(
            f"{len(plan.recompute)} blocks {'offloaded' if plan.offload else 'recomputed'}"
        )
    return ", ".join(words)


if __name__ == "__main__":
    main()
