"""How does the same GPT train on 2 × 2 × 2 ranks: stages, pieces of tensors, and copies?

    python examples/train_gpt_3d.py         (eight processes of this machine)

Layers this small are best left whole, and the compiler would leave them so. Pins say which tensors
are to be held in pieces all the same; what else follows from that is decided by the compiler.
Every data coordinate trains on its own half of the batches.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from text import batches, corpus, tokenizer
from training import launch, train

import parcompiler as pc
from parcompiler.models import gpt

CONFIG = gpt.Config(
    layers=4, heads=4, hidden=128, vocabulary=2048, sequence=64, tied=False, dropout=0.0
)
MESH = pc.Mesh(pipeline=2, tensor=2, data=2, device="cpu")
MICROBATCHES, ROWS = 4, 4  # of each data rank; rows of one micro-batch
PINS = {  # S(d): every tensor rank holds a piece along dimension d
    "layers.*.attention.qkv.weight": "S(0)",
    "layers.*.attention.out.weight": "S(1)",
    "layers.*.ffn.up.weight": "S(0)",
    "layers.*.ffn.down.weight": "S(1)",
    "head.weight": "S(0)",
}


def compile_and_export(out: Path) -> None:
    """Everything that happens before training, in one process."""
    torch.manual_seed(0)
    tokens = torch.zeros(ROWS, CONFIG.sequence, dtype=torch.long)
    program = pc.compile(
        gpt.GPT(CONFIG),
        MESH,
        inputs={"tokens": tokens, "labels": tokens},
        microbatches=MICROBATCHES,
        sharding=PINS,
    )
    print(program.report())
    print(f"rank scripts: {program.export(out)}/rank_0.py ...")


def real_text(data: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of one data coordinate: its part of the rows of each global batch."""
    text = corpus()
    tokens = torch.tensor(tokenizer(text, CONFIG.vocabulary).encode(text).ids)
    own = ROWS * MICROBATCHES
    for inputs, labels in batches(tokens, own * MESH.data, CONFIG.sequence):
        rows = slice(data * own, (data + 1) * own)
        yield {"tokens": inputs[rows], "labels": labels[rows]}


def main() -> None:
    """Compile and start the ranks; or, as one of them, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the rank scripts")
    parser.add_argument("--steps", type=int, default=30, help="training steps")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        compile_and_export(options.out)
        launch(__file__, MESH.size, "--out", str(options.out), "--steps", str(options.steps))
        return
    tokens_per_step = ROWS * MICROBATCHES * MESH.data * CONFIG.sequence
    data = MESH.coordinate(int(os.environ["RANK"])).data
    train(options.out, real_text(data), options.steps, tokens_per_step, lr=1e-3)


if __name__ == "__main__":
    main()
