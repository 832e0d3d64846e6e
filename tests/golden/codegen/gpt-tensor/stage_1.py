"""Stage 1 of 2 of GPT: layers.1, norm+embedding.

labels, layers_0 → the loss
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime


class Layer(runtime.Block):
    """layers.1, from model.py:62."""

    names = {
        "attention_norm_weight": ".attention_norm.weight",
        "attention_norm_bias": ".attention_norm.bias",
        "attention_qkv_weight": ".attention.qkv.weight",
        "attention_qkv_bias": ".attention.qkv.bias",
        "attention_out_bias": ".attention.out.bias",
        "attention_out_weight": ".attention.out.weight",
        "ffn_norm_weight": ".ffn_norm.weight",
        "ffn_norm_bias": ".ffn_norm.bias",
        "ffn_up_weight": ".ffn.up.weight",
        "ffn_up_bias": ".ffn.up.bias",
        "ffn_down_bias": ".ffn.down.bias",
        "ffn_down_weight": ".ffn.down.weight",
    }

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm_weight = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.attention_norm_bias = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.attention_qkv_weight = nn.Parameter(torch.empty(24, 16, dtype=torch.float32))
        self.attention_qkv_bias = nn.Parameter(torch.empty(24, dtype=torch.float32))
        self.attention_out_bias = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.attention_out_weight = nn.Parameter(torch.empty(16, 8, dtype=torch.float32))
        self.ffn_norm_weight = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.ffn_norm_bias = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.ffn_up_weight = nn.Parameter(torch.empty(32, 16, dtype=torch.float32))
        self.ffn_up_bias = nn.Parameter(torch.empty(32, dtype=torch.float32))  # a piece of 64
        self.ffn_down_bias = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.ffn_down_weight = nn.Parameter(torch.empty(16, 32, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        attention_norm = F.layer_norm(
            x, (16,), self.attention_norm_weight, self.attention_norm_bias, 1e-05
        )

        # attention
        attention_norm = runtime.fan_out(attention_norm)  # back: all-reduce
        qkv = F.linear(attention_norm, self.attention_qkv_weight, self.attention_qkv_bias)
        qkv = qkv.view(2, 12, 1, 24)
        qkv = qkv.transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2)
        y = y.reshape(2, 12, 8)
        attention_out_bias = runtime.first(self.attention_out_bias)
        out = F.linear(y, self.attention_out_weight, attention_out_bias)

        out = runtime.all_reduce(out)  # 2 ranks
        x = x + out
        ffn_norm = F.layer_norm(x, (16,), self.ffn_norm_weight, self.ffn_norm_bias, 1e-05)

        # ffn
        ffn_norm = runtime.fan_out(ffn_norm)  # back: all-reduce
        up = F.linear(ffn_norm, self.ffn_up_weight, self.ffn_up_bias)
        gelu = F.gelu(up, approximate="tanh")
        ffn_down_bias = runtime.first(self.ffn_down_bias)
        down = F.linear(gelu, self.ffn_down_weight, ffn_down_bias)

        down = runtime.all_reduce(down)  # 2 ranks
        x = x + down
        return x


class NormEmbedding(runtime.Block):
    """norm+embedding, from model.py:111."""

    names = {
        "norm_weight": "norm.weight",
        "norm_bias": "norm.bias",
        "embedding_weight": "embedding.weight",
    }

    def __init__(self) -> None:
        super().__init__()
        self.norm_weight = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.norm_bias = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.embedding_weight = nn.Parameter(
            torch.empty(runtime.piece(97), 16, dtype=torch.float32)
        )

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        norm = F.layer_norm(x, (16,), self.norm_weight, self.norm_bias, 1e-05)
        norm = runtime.fan_out(norm)  # back: all-reduce
        logits = F.linear(norm, self.embedding_weight)
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
