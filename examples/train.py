"""How does a training run look as a loop of one's own?

    torchrun --nproc-per-node 2 examples/train.py --data docs/ --save run/

Again, it goes on from its checkpoint. srun or a PyTorchJob start it as well as torchrun.
"""

import argparse
import math
from pathlib import Path

import torch
from nanogpt import GPT, GPTConfig

import parcompiler as pc

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", type=Path, default=Path("docs"))
parser.add_argument("--save", type=Path, default=Path("run"))
parser.add_argument("--steps", type=int, default=200)
o = parser.parse_args()
config = GPTConfig(block_size=64, vocab_size=256, n_layer=4, n_head=4, n_embd=64, dropout=0.1)
rows, lr, warmup, tokens = 4, 1e-3, 20, o.save / "tokens.bin"

torch.manual_seed(0)  # alike on every rank
idx = torch.zeros(rows, config.block_size, dtype=torch.long)
program = pc.compile(
    GPT(config), pc.Mesh(pipeline=2), {"idx": idx, "targets": idx},
    loss=lambda found: found[1], microbatches=8,
)  # fmt: skip


def rate(step: int) -> float:
    """Warm-up, then a cosine down to a tenth."""
    done = min(1.0, max(0, step - warmup) / max(1, o.steps - warmup))
    return lr * min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * done))


with program.worker() as worker:
    if worker.rank == 0:  # the others wait at the barrier
        o.save.mkdir(parents=True, exist_ok=True)
        texts = (path.read_bytes() for path in sorted(o.data.rglob("*.md")))
        pc.write_tokens(tokens, (torch.tensor([*text]) for text in texts), below=256)
    torch.distributed.barrier()
    optimizer = worker.set_optimizer(
        torch.optim.AdamW, lr=lr, max_norm=1.0, weight_decay=0.1,
        groups=[("*.bias", {"weight_decay": 0.0}), ("*ln_*", {"weight_decay": 0.0})],
    )  # fmt: skip
    if any(o.save.glob("step_*")):
        worker.load(o.save)
    texts = pc.TokenRows(tokens, worker.program, part=(0.0, 0.9))
    held = pc.TokenRows(tokens, worker.program, part=(0.9, 1.0))
    metrics = pc.Metrics(worker, every=10, jsonl=o.save / "metrics.jsonl", steps=o.steps)
    for numbers in pc.Samples(len(texts), worker):  # this data rank's rows, epoch after epoch
        if (step := worker.step_count) >= o.steps:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        metrics.before_step()
        metrics.after_step(worker.train_step(texts.batch(numbers)), rate(step))
        if worker.step_count % 50 == 0:
            loss = worker.evaluate(held.batch(range(rows)))  # any number of micro-batches
            metrics.tell(worker.step_count, {"evaluation_loss": loss.item()})
            worker.save(o.save, keep=2)
    worker.save_pretrained(o.save / "weights")
