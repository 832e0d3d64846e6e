"""How should GPT-3 be divided over 1,024 GPUs? All meshes of a cluster are weighed, on a laptop.

    python examples/plan_gpt3.py                                (175 billion parameters)
    python examples/plan_gpt3.py --preset 13b --nodes 8         (64 GPUs)
    python examples/plan_gpt3.py --html gpt3.html --plan gpt3.json

The model is on the meta device: no parameter is ever made, and no GPU is needed. Every mesh has the
same batch, the 3.2 million tokens of a step in table 2.1 of the GPT-3 paper (arXiv:2005.14165). The
report says which mesh is best and why the others lose: too little memory, ranks that wait for one
another, what tensor ranks exchange, gradients that are summed after the last backward. The plan can
be read, edited, and given to `compile(..., plan=plan)`.
"""

import argparse
import time
from pathlib import Path

import torch

import parcompiler as pc
from parcompiler.models import gpt

TOKENS = 1536 * 2048  # in a step: 3.2 million of the paper, in rows that many degrees divide


def planned(options: argparse.Namespace) -> pc.Program:
    """The program of the best mesh."""
    with torch.device("meta"):
        model = gpt.GPT(gpt.PRESETS[options.preset])
    tokens = torch.zeros(options.rows, model.config.sequence, dtype=torch.long)
    batch = options.batch or TOKENS // model.config.sequence
    return pc.compile(
        model,
        pc.Cluster(options.nodes, options.devices_per_node, options.device),
        {"tokens": tokens, "labels": tokens},
        microbatches=batch // options.rows,
        precision="bf16",
    )


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
    parser.add_argument("--preset", choices=sorted(gpt.PRESETS), default="175b")
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--devices-per-node", type=int, default=8)
    parser.add_argument("--device", default="h100", help="of the catalogue (default: h100)")
    parser.add_argument("--rows", type=int, default=1, help="of a micro-batch (default: 1)")
    parser.add_argument("--batch", type=int, help="rows of a step (default: 3.2 million tokens)")
    parser.add_argument("--html", type=Path, help="write the report as a page")
    parser.add_argument("--plan", type=Path, help="write the plan")
    return parser.parse_args()


if __name__ == "__main__":
    main()
