"""Small models, and workers on one rank: no torchrun is needed."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import parcompiler as pc

ROWS, WIDTH, CLASSES = 2, 6, 5


class Mixed(nn.Module):
    """Dropout, batch norm, a frozen layer, a parameter that is never used, and a tied one."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.twin = nn.Linear(WIDTH, WIDTH, bias=False)
        self.twin.weight = self.first.weight
        self.head = nn.Linear(WIDTH, CLASSES)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.norm(self.first(x)).relu())
        x = self.twin(self.frozen(x)).tanh()
        return F.cross_entropy(self.head(self.dropout(x)), labels)


def mixed(dropout: float = 0.0) -> Mixed:
    torch.manual_seed(0)
    return Mixed(dropout)


def batch(microbatches: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = ROWS * microbatches
    return {
        "x": torch.randn(rows, WIDTH, generator=generator),
        "labels": torch.randint(CLASSES, (rows,), generator=generator),
    }


def compiled(model: nn.Module, microbatches: int = 3, **options: Any) -> pc.Program:
    """The model on one rank, or on those of `options["mesh"]`."""
    mesh = options.pop("mesh", pc.Mesh())
    return pc.compile(model, mesh, batch(1), microbatches=microbatches, **options)


def one_process(model: nn.Module, data: dict[str, torch.Tensor], microbatches: int) -> torch.Tensor:
    """The mean loss, with its gradients accumulated, as a user would write it."""
    losses = []
    for i in range(microbatches):
        part = {key: t[i * ROWS : (i + 1) * ROWS] for key, t in data.items()}
        loss = model(**part)
        (loss / microbatches).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()
