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
        self.embedding = nn.Module()
        self.embedding.weight = nn.Parameter(torch.empty(runtime.piece(97), 16))
        self.positions = nn.Embedding(12, 16)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        embedding = runtime.embedding(tokens, self.embedding.weight, 97)
        positions = self.positions(positions)
        embedding = runtime.all_reduce(embedding)  # 2 ranks
        x = embedding + positions
        return x


class Layer(runtime.Layer):
    """layers.0, from model.py:62. The gradients of weights of `runtime.Linear`, `runtime.linear`
    are computed beside the next collective."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(16)
        self.attention = nn.Module()
        self.attention.qkv = runtime.Linear(16, 24)  # a piece of 48 x 16
        self.attention.out = nn.Module()
        self.attention.out.bias = nn.Parameter(torch.empty(16))
        self.attention.out.weight = nn.Parameter(torch.empty(16, 8))  # a piece of 16 x 16
        self.ffn_norm = nn.LayerNorm(16)
        self.ffn = nn.Module()
        self.ffn.up = runtime.Linear(16, 32)  # a piece of 64 x 16
        self.ffn.down = nn.Module()
        self.ffn.down.bias = nn.Parameter(torch.empty(16))
        self.ffn.down.weight = nn.Parameter(torch.empty(16, 32))  # a piece of 16 x 64

    def forward(self, x: Tensor) -> Tensor:
        attention_norm = self.attention_norm(x)

        # attention
        attention_norm = runtime.fan_out(attention_norm)  # back: all-reduce
        qkv = self.attention.qkv(attention_norm)
        qkv = qkv.view(*qkv.shape[:2], 1, 24)
        qkv = qkv.transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2)
        y = y.reshape(*y.shape[:2], -1)
        attention_out_bias = runtime.first(self.attention.out.bias)
        out = runtime.linear(y, self.attention.out.weight, attention_out_bias)

        out = runtime.all_reduce(out)  # 2 ranks
        x = x + out
        ffn_norm = self.ffn_norm(x)

        # ffn
        ffn_norm = runtime.fan_out(ffn_norm)  # back: all-reduce
        up = self.ffn.up(ffn_norm)
        gelu = F.gelu(up, approximate="tanh")
        ffn_down_bias = runtime.first(self.ffn.down.bias)
        down = runtime.linear(gelu, self.ffn.down.weight, ffn_down_bias)

        down = runtime.all_reduce(down)  # 2 ranks
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
        positions = torch.arange(12, device=DEVICE)
        return (positions,)

    def forward(self, tokens: Tensor) -> Tensor:
        (positions,) = self.once

        x = self.embedding_positions(tokens, positions)
        x = self.layers_0(x)
        return x
