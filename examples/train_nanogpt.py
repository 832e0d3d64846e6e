"""nanoGPT's train.py on any mesh: torchrun --nproc-per-node 2 examples/train_nanogpt.py"""

import argparse
import math
from pathlib import Path

import torch
from nanogpt import GPT, GPTConfig

import parcompiler as pc

settings = dict(data="docs/how-to/train.md", out="out-nanogpt", pipeline=2, data_ranks=1, resume=0,
    max_iters=200, batch_size=4, accumulation=8, block_size=64, n_layer=4, n_head=4, n_embd=64,
    dropout=0.0, learning_rate=1e-3, min_lr=1e-4, warmup_iters=20, weight_decay=0.1, grad_clip=1.0,
    eval_interval=50, eval_iters=4, precision="fp32",
)  # fmt: skip
parser = argparse.ArgumentParser(description=__doc__)
for name, default in settings.items():
    parser.add_argument(f"--{name}", type=type(default), default=default)
o = parser.parse_args()
text = torch.frombuffer(bytearray(Path(o.data).read_bytes()), dtype=torch.uint8).long()  # bytes
splits = {"train": text[: int(0.9 * len(text))], "val": text[int(0.9 * len(text)) :]}


def get_batch(split, step):
    draw = torch.Generator().manual_seed(step if split == "train" else -1 - step)
    rows = o.batch_size * o.accumulation * o.data_ranks
    ix = torch.randint(len(splits[split]) - o.block_size, (rows,), generator=draw)
    own = ix.chunk(worker.data_ranks)[worker.data_rank].tolist()  # the rows of this data rank
    x, y = (torch.stack([splits[split][i + k : i + k + o.block_size] for i in own]) for k in (0, 1))
    return {"idx": x, "targets": y}


def get_lr(step):
    if step < o.warmup_iters:
        return o.learning_rate * (step + 1) / (o.warmup_iters + 1)
    ratio = min(1.0, (step - o.warmup_iters) / max(1, o.max_iters - o.warmup_iters))
    return o.min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (o.learning_rate - o.min_lr)


torch.manual_seed(1337)  # alike on every rank
model = GPT(GPTConfig(o.block_size, 256, o.n_layer, o.n_head, o.n_embd, o.dropout))
idx = torch.zeros(o.batch_size, o.block_size, dtype=torch.long)
mesh = pc.Mesh(pipeline=o.pipeline, data=o.data_ranks)
program = pc.compile(model, mesh, {"idx": idx, "targets": idx}, loss=lambda found: found[1],
                     microbatches=o.accumulation, precision=o.precision)  # fmt: skip
with program.worker() as worker:
    decay = lambda name, p: {"weight_decay": o.weight_decay if p.dim() >= 2 else 0.0}  # noqa: E731
    optimizer = worker.set_optimizer(torch.optim.AdamW, groups=decay, lr=o.learning_rate,
                                     betas=(0.9, 0.95), max_norm=o.grad_clip)  # fmt: skip
    for step in range(worker.load(o.out) if o.resume else 0, o.max_iters):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step)
        line = f"step {step}: loss {worker.train_step(get_batch('train', step)).item():.12f}"
        if (step + 1) % o.eval_interval == 0:
            val = sum(worker.evaluate(get_batch("val", k)).item() for k in range(o.eval_iters))
            line += f", val loss {val / o.eval_iters:.12f}"
            worker.save(o.out)
        if worker.rank == 0:
            print(line, flush=True)
