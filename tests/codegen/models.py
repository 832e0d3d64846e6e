"""Plain models whose emitted code is looked at, each with one micro-batch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, LENGTH, HIDDEN, VOCABULARY = 2, 6, 8, 20


class SharedLayer(nn.Module):
    """Half an ALBERT layer: a linear map, a norm and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.dense = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        inner = self.dense(self.norm(hidden)).tanh()
        hidden = hidden + inner * mask
        return hidden


class Albert(nn.Module):
    """One layer called four times, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([SharedLayer()])
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        mask = (tokens > 0).unsqueeze(-1)
        hidden = self.words(tokens)
        for _ in range(4):
            hidden = self.layers[0](hidden, mask)
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.flatten(end_dim=1), labels.flatten())
        return loss


class Stem(nn.Module):
    """A convolution with running statistics, updated in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, HIDDEN, 3, padding=1)
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, signal: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(signal)), inplace=True)
        return y


class Mixer(nn.Module):
    """Dropout, a scale without gradient, and a product in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(0.25)

    def forward(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            scale = y.abs().amax(dim=1, keepdim=True).clamp(min=1.0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = self.dense((y / scale).transpose(1, 2))
        y = y + self.dropout(mixed.float()).transpose(1, 2)
        return y


class Regions(nn.Module):
    """Everything that a forward may do besides computing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Stem()
        self.mixers = nn.ModuleList(Mixer() for _ in range(2))
        self.head = nn.Linear(HIDDEN, 3)

    def forward(self, signal: Tensor, labels: Tensor) -> Tensor:
        y = self.stem(signal)
        for mixer in self.mixers:
            y = mixer(y)
        logits = self.head(y.mean(dim=-1))
        loss = F.cross_entropy(logits, labels)
        return loss


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    return {"tokens": ids, "labels": ids}


def signals() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    signal = torch.randn(ROWS, 1, LENGTH, generator=generator)
    return {"signal": signal, "labels": torch.tensor([0, 2])}
