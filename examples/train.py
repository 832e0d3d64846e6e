"""How does a training run look as a loop of one's own?

    python examples/train.py --data docs/ --save run/       again: it goes on from its checkpoint

Compiles a GPT for two pipeline ranks, makes tokens of the texts, and starts itself as two ranks.
"""

import argparse
import math
import os
from pathlib import Path

import torch
from nanogpt import GPT, GPTConfig
from text import tokenizer
from training import launch

import parcompiler as pc

CONFIG = GPTConfig(block_size=64, vocab_size=1024, n_layer=4, n_head=4, n_embd=64, dropout=0.1)
RANKS, MICROBATCHES, ROWS, LR, WARMUP = 2, 8, 4, 1e-3, 20


def prepare(data: Path, save: Path) -> None:
    """The rank scripts and the tokens, made once in one process."""
    torch.manual_seed(0)
    idx = torch.zeros(ROWS, CONFIG.block_size, dtype=torch.long)
    program = pc.compile(
        GPT(CONFIG), pc.Mesh(pipeline=RANKS), {"idx": idx, "targets": idx},
        loss=lambda found: found[1], microbatches=MICROBATCHES,
    )  # fmt: skip
    program.export(save / "program")
    text = "\n".join(path.read_text() for path in sorted(data.rglob("*.md")))
    pc.write_tokens(
        save / "tokens.bin", torch.tensor(tokenizer(text, CONFIG.vocab_size).encode(text).ids)
    )


def rate(step: int, steps: int) -> float:
    """Warm-up, then a cosine down to a tenth."""
    done = min(1.0, max(0, step - WARMUP) / max(1, steps - WARMUP))
    return min(1.0, (step + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * done))


def train(save: Path, steps: int) -> None:
    """All steps of this process's rank."""
    with pc.load(save / "program").worker() as worker:
        optimizer = worker.set_optimizer(
            torch.optim.AdamW, lr=LR, max_norm=1.0, weight_decay=0.1,
            groups=[("*.bias", {"weight_decay": 0.0}), ("*ln_*", {"weight_decay": 0.0})],
        )  # fmt: skip
        if any(save.glob("step_*")):
            worker.load(save)
        rows = pc.TokenRows(save / "tokens.bin", worker.program, part=(0.0, 0.9))
        held = pc.TokenRows(save / "tokens.bin", worker.program, part=(0.9, 1.0))
        metrics = pc.Metrics(worker, every=10, jsonl=save / "metrics.jsonl", steps=steps)
        for numbers in pc.Samples(len(rows), worker):  # this data rank's rows, epoch after epoch
            if (step := worker.step_count) >= steps:
                break
            for group in optimizer.param_groups:
                group["lr"] = LR * rate(step, steps)
            metrics.before_step()
            metrics.after_step(worker.train_step(rows.batch(numbers)), LR * rate(step, steps))
            if worker.step_count % 50 == 0:
                loss = worker.evaluate(held.batch(range(ROWS)))  # any number of micro-batches
                metrics.tell(worker.step_count, {"evaluation_loss": loss.item()})
                worker.save(save, keep=2)
        worker.save_pretrained(save / "weights")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("docs"))
    parser.add_argument("--save", type=Path, default=Path("run"))
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    if "RANK" in os.environ:
        train(options.save, options.steps)
    else:
        options.save.mkdir(exist_ok=True)
        prepare(options.data, options.save)
        arguments = ["--save", str(options.save), "--steps", str(options.steps)]
        launch(__file__, RANKS, *arguments)
