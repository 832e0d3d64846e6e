"""Stage 1 of 2 of GPT: layers.2, layers.3, norm.

layers_1 → norm
"""

from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime


class Layer(runtime.Layer):
    """layers.2, layers.3, from model.py:62."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(16)
        self.attention = nn.Module()
        self.attention.qkv = nn.Linear(16, 48)
        self.attention.out = nn.Linear(16, 16)
        self.ffn_norm = nn.LayerNorm(16)
        self.ffn = nn.Module()
        self.ffn.up = nn.Linear(16, 64)
        self.ffn.down = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        attention_norm = self.attention_norm(x)

        # attention
        qkv = self.attention.qkv(attention_norm)
        qkv = qkv.view(*qkv.shape[:2], 2, 24)
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


class Norm(runtime.Layer):
    """norm, from model.py:111."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm(x)
        norm = norm.reshape(-1, 16)
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
