"""How does an ordinary GPT train on two pipeline ranks?

    python examples/train_gpt.py            (or: make demo)

The model is compiled once, the report printed, the rank scripts written to `out/`. Then this file
is started again as two processes, each of which loads its rank from `out/` and trains on the
language reference of Python. The loss starts at about ln 4096 = 8.3.
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
    layers=6, heads=6, hidden=192, vocabulary=4096, sequence=128, tied=False, dropout=0.0
)
RANKS, MICROBATCHES, ROWS = 2, 8, 4  # rows of one micro-batch


def compile_and_export(out: Path) -> None:
    """Everything that happens before training, in one process."""
    torch.manual_seed(0)
    tokens = torch.zeros(ROWS, CONFIG.sequence, dtype=torch.long)
    program = pc.compile(
        gpt.GPT(CONFIG),
        pc.Mesh(pipeline=RANKS, device="cpu"),
        inputs={"tokens": tokens, "labels": tokens},
        microbatches=MICROBATCHES,
    )
    print(program.report())
    print(f"rank scripts: {program.export(out)}/rank_0.py ...")


def real_text() -> Iterator[dict[str, torch.Tensor]]:
    """Batches of this model; every rank makes the same ones."""
    text = corpus()
    tokens = torch.tensor(tokenizer(text, CONFIG.vocabulary).encode(text).ids)
    for inputs, labels in batches(tokens, ROWS * MICROBATCHES, CONFIG.sequence):
        yield {"tokens": inputs, "labels": labels}


def main() -> None:
    """Compile and start the ranks; or, as one of them, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the rank scripts")
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        compile_and_export(options.out)
        launch(__file__, RANKS, "--out", str(options.out), "--steps", str(options.steps))
        return
    tokens_per_step = ROWS * MICROBATCHES * CONFIG.sequence
    train(options.out, real_text(), options.steps, tokens_per_step, lr=1e-3)


if __name__ == "__main__":
    main()
