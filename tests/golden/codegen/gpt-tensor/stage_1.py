"""Stage 1 of 2 of GPT: layers.1, norm+embedding.

labels, layers_0 → the loss
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime


class Layer(runtime.Layer):
    """layers.1, from model.py:62. The gradients of weights of `runtime.Linear`, `runtime.linear`
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


class NormEmbedding(runtime.Layer):
    """norm+embedding, from model.py:111."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.embedding = nn.Module()
        self.embedding.weight = nn.Parameter(torch.empty(runtime.piece(97), 16))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        norm = self.norm(x)
        norm = runtime.fan_out(norm)  # back: all-reduce
        logits = F.linear(norm, self.embedding.weight)
        logits = logits.flatten(end_dim=1)
        labels = labels.flatten()
        cross_entropy = runtime.cross_entropy(logits, labels, 97)  # all-reduce
        return cross_entropy


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
