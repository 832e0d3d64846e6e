"""What does Llama 3.1 405B take on 16,384 GPUs? The mesh that trained it, planned on a laptop.

    python examples/plan_llama405b.py                    (tensor 8, pipeline 16, data 128)
    python examples/plan_llama405b.py --search           (every mesh of the same GPUs instead)
    python examples/plan_llama405b.py --layers 4 --pipeline 2 --data 2 --sequence 512

Table 4 of "The Llama 3 Herd of Models" (arXiv:2407.21783) has this mesh, with 16 rows of 8,192
tokens on each data rank, and 41 % of the peak FLOPs used. The model is the one of `transformers`,
from its configuration and without parameters; nothing is downloaded. Planning does not grow with
the number of GPUs: all ranks at a pipeline coordinate have the same program.
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import parcompiler as pc

ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def configured(options: argparse.Namespace) -> LlamaConfig:
    """The published configuration of Llama 3.1 405B, with as many layers as asked for."""
    return LlamaConfig(
        num_hidden_layers=options.layers,
        hidden_size=16384,
        intermediate_size=53248,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_parameters=ROPE,
        tie_word_embeddings=False,
        use_cache=False,
    )


def planned(options: argparse.Namespace) -> pc.Program:
    """The program of the given mesh, or of the best of all with so many GPUs."""
    with torch.device("meta"):
        model = LlamaForCausalLM(configured(options))
    tokens = torch.zeros(1, options.sequence, dtype=torch.long)
    mesh = pc.Mesh(options.pipeline, options.tensor, options.data, options.device)
    microbatches = options.microbatches
    where: pc.Mesh | pc.Cluster = mesh
    if options.search:
        each = mesh.hardware.devices_per_node
        where = pc.Cluster(max(1, mesh.size // each), min(each, mesh.size), options.device)
        microbatches *= mesh.data
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    return pc.compile(model, where, inputs, microbatches=microbatches, precision="bf16")


def main() -> None:
    """Plan, and show the report."""
    options = arguments()
    begin = time.perf_counter()
    program = planned(options)
    report = program.report()
    print(report)
    print(f"\nplanned in {time.perf_counter() - begin:.0f} s, capture and report included")
    if options.plan:
        options.plan.write_text(program.plan.to_json())
    if options.html:
        report.to_html(options.html)


def arguments() -> argparse.Namespace:
    """What is typed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--pipeline", type=int, default=16)
    parser.add_argument("--tensor", type=int, default=8)
    parser.add_argument("--data", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=16, help="of one row, on a data rank")
    parser.add_argument("--device", default="h100", help="of the catalogue (default: h100)")
    parser.add_argument("--search", action="store_true", help="weigh all meshes of the same GPUs")
    parser.add_argument("--html", type=Path, help="write the report as a page")
    parser.add_argument("--plan", type=Path, help="write the plan")
    return parser.parse_args()


if __name__ == "__main__":
    main()
