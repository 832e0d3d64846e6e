"""Does training with the vocabulary on all ranks follow the loss curve of one process?

    python benchmarks/vocabulary/curve.py [--methods vocab-1 vocab-2] [--steps 200] [--lr 3e-4]

A GPT trains in float32 on the text of examples/train_gpt.py: once in one process, and under each
method on pipeline ranks. All begin with the same weights and see the same batches. The table has
the largest difference between the losses of one step; the exit status is 1 when it is too large.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

import parcompiler as pc
from parcompiler.models import gpt

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Size:
    """A model, and what it sees in a step."""

    config: gpt.Config
    microbatches: int
    rows: int  # of one micro-batch


SIZES = {
    "small": Size(
        gpt.Config(layers=4, heads=4, hidden=128, vocabulary=4096, sequence=64, tied=False), 4, 2
    ),
    # Those of examples/train_gpt.py.
    "example": Size(
        gpt.Config(layers=6, heads=6, hidden=192, vocabulary=4096, sequence=128, tied=False), 8, 4
    ),
}
METHODS = ("whole", "naive", "vocab-1", "vocab-2", "interlaced")
LIMIT = 1e-4  # of a loss that begins at ln 4096 = 8.3
TIMEOUT = timedelta(minutes=10)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["vocab-1", "vocab-2"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--optimizer", choices=("AdamW", "SGD"), default="AdamW")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--losses", type=Path, help="write the losses of every step, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        export(Path(name), options.methods, options.ranks, SIZES[options.size])
        multiprocessing.spawn(train, (name, options), nprocs=options.ranks)
        losses = json.loads((Path(name) / "losses.json").read_text(encoding="utf-8"))
    if options.losses:
        options.losses.write_text(json.dumps(losses), encoding="utf-8")
    sys.exit(not summary(losses))


def export(folder: Path, methods: list[str], ranks: int, size: Size) -> None:
    """A program for every method, the model they are of, and the text."""
    sys.path.append(str(EXAMPLES))
    from text import corpus, tokenizer

    text = corpus()
    tokens = torch.tensor(tokenizer(text, size.config.vocabulary).encode(text).ids)
    torch.manual_seed(0)
    model = gpt.GPT(size.config)
    torch.save((tokens, model.state_dict()), folder / "given.pt")
    example = torch.zeros(size.rows, size.config.sequence, dtype=torch.long)
    for method in methods:
        program = pc.compile(
            model,
            pc.Mesh(pipeline=ranks, device="cpu"),
            {"tokens": example, "labels": example},
            schedule="1f1b",
            vocabulary=method,
            microbatches=size.microbatches,
            progress=False,
        )
        program.export(folder / method)


def train(rank: int, name: str, options: argparse.Namespace) -> None:
    """One rank of every program, and on rank 0 the model alone: the same batch for all in turn."""
    torch.set_num_threads(1)
    folder, size, kind = Path(name), SIZES[options.size], getattr(torch.optim, options.optimizer)
    store = dist.FileStore(str(folder / "store"), options.ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=options.ranks, timeout=TIMEOUT
    )
    tokens, weights = torch.load(folder / "given.pt")
    workers = {method: pc.load(folder / method).worker() for method in options.methods}
    for worker in workers.values():
        worker.set_optimizer(kind, lr=options.lr)
    model = gpt.GPT(size.config)
    model.load_state_dict(weights)
    optimizer = kind(model.parameters(), lr=options.lr)
    losses: dict[str, list[float]] = {"one process": [], **{method: [] for method in workers}}
    for batch in itertools.islice(batches(tokens, size), options.steps):
        for method, worker in workers.items():
            losses[method].append(worker.train_step(batch).item())
        if rank == 0:
            losses["one process"].append(alone(model, optimizer, batch, size))
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(losses), encoding="utf-8")
    dist.barrier()  # nobody leaves while others are in their last step
    for worker in workers.values():
        worker.close()
    dist.destroy_process_group()


def batches(tokens: torch.Tensor, size: Size) -> Iterator[Batch]:
    """Random windows of the text, the same on every rank."""
    generator, length = torch.Generator().manual_seed(0), size.config.sequence
    last, rows = len(tokens) - length - 1, size.microbatches * size.rows
    while True:
        starts = torch.randint(last, (rows,), generator=generator)
        windows = torch.stack([tokens[s : s + length + 1] for s in starts.tolist()])
        yield {"tokens": windows[:, :-1].contiguous(), "labels": windows[:, 1:].contiguous()}


def alone(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, size: Size) -> float:
    """A step in one process, one micro-batch after another; its mean loss."""
    optimizer.zero_grad(set_to_none=True)
    pieces = [tensor.split(size.rows) for tensor in batch.values()]
    total = 0.0
    for tokens, labels in zip(*pieces, strict=True):
        loss = model(tokens, labels) / size.microbatches
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def summary(losses: dict[str, list[float]]) -> bool:
    """Print how far each method is from one process; whether all are near enough."""
    print("| method | steps | first loss | last loss | largest difference | at step |")
    print("|---|---|---|---|---|---|")
    near, wanted = True, losses["one process"]
    for method, found in losses.items():
        apart = [abs(a - b) for a, b in zip(found, wanted, strict=True)]
        worst = max(apart)
        near &= worst <= LIMIT
        cells = (method, len(found), f"{found[0]:.4f}", f"{found[-1]:.4f}", f"{worst:.1e}")
        print("| " + " | ".join(map(str, (*cells, apart.index(worst)))) + " |")
    return near


if __name__ == "__main__":
    main()
