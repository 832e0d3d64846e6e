"""Stage 0 of 2 of GPT: embedding+positions, layers.0.

tokens → layers_0
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime

DEVICE = runtime.rank_device("cpu")


class EmbeddingPositions(runtime.Layer):
    """embedding+positions, from model.py:108."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8, dtype=torch.float64)
        self.positions = nn.Embedding(4, 8, dtype=torch.float64)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        embedding = self.embedding(tokens)
        positions = self.positions(positions)
        x = embedding + positions
        return x


class Layer(runtime.Layer):
    """layers.0, from model.py:62."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(8, dtype=torch.float64)
        self.attention = nn.Module()
        self.attention.qkv = nn.Linear(8, 24, dtype=torch.float64)
        self.attention.out = nn.Linear(8, 8, dtype=torch.float64)
        self.ffn_norm = nn.LayerNorm(8, dtype=torch.float64)
        self.ffn = nn.Module()
        self.ffn.up = nn.Linear(8, 32, dtype=torch.float64)
        self.ffn.down = nn.Linear(32, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        attention_norm = self.attention_norm(x)

        # attention
        qkv = self.attention.qkv(attention_norm)
        qkv = qkv.view(*qkv.shape[:2], 2, 12)
        qkv = qkv.transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2)
        y = y.reshape(*y.shape[:2], -1)
        out = self.attention.out(y)

        x = x + out
        ffn_norm = self.ffn_norm(x)

        # ffn
        up = self.ffn.up(ffn_norm)
        gelu = F.gelu(up, approximate="tanh")
        down = self.ffn.down(gelu)

        x = x + down
        return x


class Stage0(runtime.Stage):
    """Stage 0 of 2 of GPT: embedding+positions, layers.0."""

    inputs = ("tokens",)
    gives = ("layers_0",)
    scopes = {
        "embedding_positions": "",
        "layers_0": "layers.0",
    }

    def __init__(self) -> None:
        super().__init__()
        self.embedding_positions = EmbeddingPositions()
        self.layers_0 = Layer()

    def constants(self) -> tuple[Tensor, ...]:
        # Computed once: no input, no parameter.
        positions = torch.arange(4, device=DEVICE)
        return (positions,)

    def forward(self, tokens: Tensor) -> Tensor:
        (positions,) = self.once

        x = self.embedding_positions(tokens, positions)
        x = self.layers_0(x)
        return x
