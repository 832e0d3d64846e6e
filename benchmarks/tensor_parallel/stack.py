"""The layers that both sides run: those of GPT, the sizes of attention read off its operands."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import parcompiler as pc
from parcompiler.models import gpt
from parcompiler.models.gpt.model import Attention, Layer

LAYERS, ROWS, SEQUENCE = 4, 4, 128

# The layers of Megatron-LM (1909.08053). At hidden 256 the programme finds the same without pins,
# at 1024 another plan: they fix what is compared.
PINS = {
    "*.qkv.weight": "S(0)", "*.out.weight": "S(1)", "*.up.weight": "S(0)", "*.down.weight": "S(1)",
}  # fmt: skip


class LocalAttention(Attention):
    """Attention of as many heads as its projections have."""

    def forward(self, x: Tensor) -> Tensor:
        """Of [batch, sequence, hidden]."""
        batch, sequence, _ = x.shape
        qkv = self.qkv(x).view(batch, sequence, -1, 3 * self.head_size)
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, sequence, -1))
        return out


class Stack(nn.Module):
    """Layers of GPT on given activations [rows, sequence, hidden], and the mean of the squares."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        config = gpt.Config(
            layers=LAYERS, heads=hidden // 64, hidden=hidden, vocabulary=2, sequence=SEQUENCE
        )
        self.layers = nn.ModuleList(Layer(config) for _ in range(LAYERS))
        for layer in self.layers:
            layer.attention = LocalAttention(config)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def stack(hidden: int) -> Stack:
    """The layers with the same weights wherever they are made."""
    torch.manual_seed(0)
    return Stack(hidden)


def batch(hidden: int, seed: int) -> Tensor:
    """Activations, the same on both ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, SEQUENCE, hidden, generator=generator)


def compiled(hidden: int) -> pc.Program:
    """The program of two tensor ranks."""
    return pc.compile(
        stack(hidden),
        pc.Mesh(tensor=2, device="cpu"),
        (batch(hidden, 0),),
        microbatches=1,
        sharding=PINS,
        progress=False,
    )
