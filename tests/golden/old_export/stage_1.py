"""Stage 1 of 2 of GPT: layers.1, norm+embedding.

labels, layers_0 → the loss
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime


class Layer(runtime.Layer):
    """layers.1, from model.py:62."""

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


class NormEmbedding(runtime.Layer):
    """norm+embedding, from model.py:111."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, dtype=torch.float64)
        self.embedding = nn.Module()
        self.embedding.weight = nn.Parameter(torch.empty(16, 8, dtype=torch.float64))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        norm = self.norm(x)
        logits = F.linear(norm, self.embedding.weight)
        logits = logits.flatten(end_dim=1)
        labels = labels.flatten()
        loss = F.cross_entropy(logits, labels)
        return loss


class Stage1(runtime.Stage):
    """Stage 1 of 2 of GPT: layers.1, norm+embedding."""

    inputs = ("labels",)
    receives = ("layers_0",)
    loss = True
    scopes = {
        "layers_1": "layers.1",
        "norm_embedding": "",
    }

    def __init__(self) -> None:
        super().__init__()
        self.layers_1 = Layer()
        self.norm_embedding = NormEmbedding()

    def forward(self, labels: Tensor, layers_0: Tensor) -> Tensor:
        x = self.layers_1(layers_0)
        loss = self.norm_embedding(x, labels)
        return loss
