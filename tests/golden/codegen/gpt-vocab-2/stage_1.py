"""Stage 1 of 2 of GPT: layers.2, layers.3, norm.

layers_1 → norm
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime


class Layer(runtime.Block):
    """layers.2, layers.3, from model.py:62."""

    names = {
        "attention_norm_weight": ".attention_norm.weight",
        "attention_norm_bias": ".attention_norm.bias",
        "attention_qkv_weight": ".attention.qkv.weight",
        "attention_qkv_bias": ".attention.qkv.bias",
        "attention_out_weight": ".attention.out.weight",
        "attention_out_bias": ".attention.out.bias",
        "ffn_norm_weight": ".ffn_norm.weight",
        "ffn_norm_bias": ".ffn_norm.bias",
        "ffn_up_weight": ".ffn.up.weight",
        "ffn_up_bias": ".ffn.up.bias",
        "ffn_down_weight": ".ffn.down.weight",
        "ffn_down_bias": ".ffn.down.bias",
    }

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm_weight = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.attention_norm_bias = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.attention_qkv_weight = nn.Parameter(torch.empty(48, 16, dtype=torch.float32))
        self.attention_qkv_bias = nn.Parameter(torch.empty(48, dtype=torch.float32))
        self.attention_out_weight = nn.Parameter(torch.empty(16, 16, dtype=torch.float32))
        self.attention_out_bias = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.ffn_norm_weight = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.ffn_norm_bias = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.ffn_up_weight = nn.Parameter(torch.empty(64, 16, dtype=torch.float32))
        self.ffn_up_bias = nn.Parameter(torch.empty(64, dtype=torch.float32))
        self.ffn_down_weight = nn.Parameter(torch.empty(16, 64, dtype=torch.float32))
        self.ffn_down_bias = nn.Parameter(torch.empty(16, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        attention_norm = F.layer_norm(
            x, (16,), self.attention_norm_weight, self.attention_norm_bias, 1e-05
        )

        # attention
        qkv = F.linear(attention_norm, self.attention_qkv_weight, self.attention_qkv_bias)
        qkv = qkv.view(2, 12, 2, 24)
        qkv = qkv.transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2)
        y = y.reshape(2, 12, 16)
        out = F.linear(y, self.attention_out_weight, self.attention_out_bias)

        x = x + out
        ffn_norm = F.layer_norm(x, (16,), self.ffn_norm_weight, self.ffn_norm_bias, 1e-05)

        # ffn
        up = F.linear(ffn_norm, self.ffn_up_weight, self.ffn_up_bias)
        gelu = F.gelu(up, approximate="tanh")
        down = F.linear(gelu, self.ffn_down_weight, self.ffn_down_bias)

        x = x + down
        return x


class Norm(runtime.Block):
    """norm, from model.py:111."""

    names = {
        "norm_weight": "norm.weight",
        "norm_bias": "norm.bias",
    }

    def __init__(self) -> None:
        super().__init__()
        self.norm_weight = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.norm_bias = nn.Parameter(torch.empty(16, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        norm = F.layer_norm(x, (16,), self.norm_weight, self.norm_bias, 1e-05)
        norm = norm.reshape(24, -1)
        return norm


class Stage1(runtime.Stage):
    """Stage 1 of 2 of GPT: layers.2, layers.3, norm."""

    receives = ("layers_1",)
    gives = ("norm",)
    scopes = {
        "layers.0": "layers.2",
        "layers.1": "layers.3",
        "norm": "",
    }

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = Norm()

    def forward(self, layers_1: Tensor) -> Tensor:
        x = layers_1
        for layer in self.layers:
            x = layer(x)
        norm = self.norm(x)
        return norm
