"""Small layers of the usual kinds."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class GptLayer(nn.Module):
    """Attention and a perceptron, each after a norm and with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From and to (batch, length, width)."""
        batch, length, width = x.shape
        heads = (batch, length, self.heads, width // self.heads)
        query, key, value = (
            part.view(heads).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class ResidualBlock(nn.Module):
    """Two convolutions with batch norms; the activation works in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From and to (batch, channels, height, width)."""
        y = self.relu(self.norm1(self.conv1(x)))
        out: torch.Tensor = self.relu(self.norm2(self.conv2(y)) + x)
        return out


class Loss(nn.Module):
    """Embedding, dropout, head and cross-entropy: ends of a language model."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of (batch, length) words."""
        logits = self.head(F.dropout(self.embed(ids), 0.1))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
