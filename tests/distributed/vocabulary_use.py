"""Uses programs with the vocabulary on all ranks as a user would, and saves what each rank saw.

The folder has the programs and gets `rank_N.pt`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import parcompiler as pc
from parcompiler.models import gpt

VOCABULARY, ROWS, LENGTH, MICROBATCHES, STEPS = 101, 2, 6, 3, 3
IGNORED = -100
RATE, DECAY = 0.05, 0.3


def model(*, tied: bool, dropout: float = 0.0) -> gpt.GPT:
    """Its vocabulary divides by no number of ranks."""
    config = gpt.Config(
        layers=4, heads=2, hidden=8, vocabulary=VOCABULARY, sequence=LENGTH, tied=tied,
        dropout=dropout,
    )  # fmt: skip
    torch.manual_seed(0)
    return gpt.GPT(config)


MODELS: dict[str, Callable[[], gpt.GPT]] = {
    "plain": lambda: model(tied=False),
    "dropout": lambda: model(tied=True, dropout=0.2),
}


def batch(seed: int, microbatches: int = MICROBATCHES) -> dict[str, torch.Tensor]:
    """Any words, the last ones of the table among them; some labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS * microbatches, LENGTH)
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    labels = torch.randint(VOCABULARY, shape, generator=generator)
    tokens[0, 0] = labels[0, 0] = VOCABULARY - 1
    labels[:, -1] = IGNORED
    return {"tokens": tokens, "labels": labels}


def ignored() -> dict[str, torch.Tensor]:
    """A batch in whose last micro-batch no label counts."""
    found = batch(7)
    found["labels"][-ROWS:] = IGNORED
    return found


def own(worker: pc.Worker) -> dict[str, torch.Tensor]:
    """A copy of what the rank holds."""
    return {name: tensor.detach().clone() for name, tensor in worker.named_parameters()}


def train(worker: pc.Worker, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Steps with weight decay, weights out and in, and a batch without labels."""
    given = worker.gather_state_dict()
    worker.set_optimizer(torch.optim.AdamW, lr=RATE, weight_decay=DECAY)
    losses = [worker.train_step(batch(seed)) for seed in range(STEPS)]
    found: dict[str, Any] = {
        "given": given,
        "losses": torch.stack(losses),
        "held": own(worker),
        "trained": worker.gather_state_dict(),
    }
    found["refused"] = refused(worker, weights)
    found["loaded"] = worker.load_state_dict(weights)
    found["again"] = worker.gather_state_dict()
    found["nothing"] = worker.step(ignored())
    found["gradients"] = worker.gather_gradients()
    return found


def refused(worker: pc.Worker, weights: Mapping[str, torch.Tensor]) -> str:
    """What loading says of a state dict that lacks names of two ranks and has one of none."""
    missing = ("embedding.weight", "layers.0.ffn_norm.bias", "layers.3.ffn_norm.bias")
    wrong = {name: tensor for name, tensor in weights.items() if name not in missing}
    try:
        worker.load_state_dict({**wrong, "heads.weight": torch.zeros(2)})
    except pc.InputError as error:
        return str(error)
    return ""


def draw(worker: pc.Worker, *, evaluating: bool) -> dict[str, Any]:
    """Two steps, and perhaps an evaluation between them."""
    first = worker.step(batch(0))
    before = own(worker)
    evaluation = worker.evaluate(batch(1)) if evaluating else None
    same = all(torch.equal(tensor, before[name]) for name, tensor in worker.named_parameters())
    losses = torch.stack([first, worker.step(batch(0))])
    return {"losses": losses, "evaluation": evaluation, "same": same}


def main(folder: str) -> None:
    found: dict[str, Any] = {}
    weights = MODELS["plain"]().double().state_dict()
    for path in sorted(path for path in Path(folder).iterdir() if path.is_dir()):
        kind = path.name.split()[0]
        if kind == "plain":
            with pc.load(path).worker() as worker:
                found[path.name] = train(worker, weights)
            continue
        for evaluating in (False, True):
            torch.manual_seed(5)
            with pc.load(path).worker() as worker:
                found[f"{path.name} {evaluating}"] = draw(worker, evaluating=evaluating)
    torch.save(found, Path(folder, f"rank_{os.environ['RANK']}.pt"))
