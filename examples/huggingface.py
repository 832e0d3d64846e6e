"""How does an unmodified Hugging Face model train on two pipeline ranks?

    python examples/huggingface.py

The model is built from a configuration (nothing is downloaded); otherwise as train_gpt.py.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from text import batches, corpus, tokenizer
from training import launch, train
from transformers import LlamaConfig, LlamaForCausalLM

import parcompiler as pc

CONFIG = LlamaConfig(
    num_hidden_layers=6,
    num_attention_heads=6,
    num_key_value_heads=2,
    hidden_size=192,
    intermediate_size=512,
    vocab_size=4096,
    max_position_embeddings=128,
)
RANKS, MICROBATCHES, ROWS, SEQUENCE = 2, 8, 4, 128


def compile_and_export(out: Path) -> None:
    """Everything that happens before training, in one process."""
    torch.manual_seed(0)
    tokens = torch.zeros(ROWS, SEQUENCE, dtype=torch.long)
    program = pc.compile(
        LlamaForCausalLM(CONFIG),
        pc.Mesh(pipeline=RANKS, device="cpu"),
        inputs={"input_ids": tokens, "labels": tokens, "use_cache": False},
        microbatches=MICROBATCHES,
    )
    print(program.report())
    print(f"rank scripts: {program.export(out)}/rank_0.py ...")


def real_text() -> Iterator[dict[str, torch.Tensor]]:
    """Batches of this model, which shifts the labels itself."""
    text = corpus()
    tokens = torch.tensor(tokenizer(text, CONFIG.vocab_size).encode(text).ids)
    for inputs, _ in batches(tokens, ROWS * MICROBATCHES, SEQUENCE):
        yield {"input_ids": inputs, "labels": inputs}


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
    train(options.out, real_text(), options.steps, ROWS * MICROBATCHES * SEQUENCE, lr=1e-3)


if __name__ == "__main__":
    main()
