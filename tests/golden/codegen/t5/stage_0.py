"""Stage 0 of 4 of T5: embedding+encoder_bias, encoder_layers.0.

tokens → embedding_encoder_bias, encoder_layers_0
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime

DEVICE = runtime.rank_device("cpu")


class EmbeddingEncoderBias(runtime.Layer):
    """embedding+encoder_bias, from model.py:214."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 16)
        self.encoder_bias = nn.Module()
        self.encoder_bias.weight = nn.Parameter(torch.empty(32, 2))

    def forward(self, tokens: Tensor, buckets: Tensor) -> tuple[Tensor, ...]:
        embedding = self.embedding(tokens)

        # encoder_bias
        bias = F.embedding(buckets, self.encoder_bias.weight)
        bias = bias.permute(2, 0, 1)
        bias = bias.unsqueeze(0)
        return embedding, bias


class EncoderLayer(runtime.Layer):
    """encoder_layers.0, from model.py:123."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(16, eps=1e-06)
        self.attention = nn.Module()
        self.attention.query = nn.Linear(16, 16, bias=False)
        self.attention.key = nn.Linear(16, 16, bias=False)
        self.attention.value = nn.Linear(16, 16, bias=False)
        self.attention.out = nn.Linear(16, 16, bias=False)
        self.ffn_norm = nn.RMSNorm(16, eps=1e-06)
        self.ffn = nn.Module()
        self.ffn.up = nn.Linear(16, 64, bias=False)
        self.ffn.down = nn.Linear(64, 16, bias=False)

    def forward(self, embedding: Tensor, bias: Tensor) -> Tensor:
        y = self.attention_norm(embedding)

        # attention
        query = self.attention.query(y)
        q = query.view(*query.shape[:2], 2, 8)
        q = q.transpose(1, 2)
        key = self.attention.key(y)
        k = key.view(*key.shape[:2], 2, 8)
        k = k.transpose(1, 2)
        value = self.attention.value(y)
        v = value.view(*value.shape[:2], 2, 8)
        v = v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        x = y.transpose(1, 2)
        x = x.flatten(2)
        x = self.attention.out(x)

        x = embedding + x
        ffn_norm = self.ffn_norm(x)

        # ffn
        up = self.ffn.up(ffn_norm)
        relu = F.relu(up)
        down = self.ffn.down(relu)

        x = x + down
        return x


class Stage0(runtime.Stage):
    """Stage 0 of 4 of T5: embedding+encoder_bias, encoder_layers.0."""

    inputs = ("tokens",)
    gives = ("embedding_encoder_bias", "encoder_layers_0")
    scopes = {
        "embedding_encoder_bias": "",
        "encoder_layers_0": "encoder_layers.0",
    }

    def __init__(self) -> None:
        super().__init__()
        self.embedding_encoder_bias = EmbeddingEncoderBias()
        self.encoder_layers_0 = EncoderLayer()

    def constants(self) -> tuple[Tensor, ...]:
        # Computed once: no input, no parameter.
        positions = torch.arange(12, device=DEVICE)
        unsqueeze = positions.unsqueeze(1)
        positions = positions.unsqueeze(0)
        difference = unsqueeze - positions
        magnitude = torch.abs(difference)
        clamp = magnitude.clamp(1)
        ratio = clamp / 8
        log2 = torch.log2(ratio)
        product = log2 * 2.0
        product = product.to(torch.int64)
        total = product + 8
        clamp = total.clamp(max=15)
        below = magnitude < 8
        chosen = torch.where(below, magnitude, clamp)
        below = difference < 0
        total = chosen + 16
        buckets = torch.where(below, total, chosen)
        return (buckets,)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        (buckets,) = self.once

        embedding, bias = self.embedding_encoder_bias(tokens, buckets)
        x = self.encoder_layers_0(embedding, bias)
        return bias, x
