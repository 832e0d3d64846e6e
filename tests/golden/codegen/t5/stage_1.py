"""Stage 1 of 4 of T5: encoder_layers.1, embedding+decoder_bias.

decoder_tokens, embedding_encoder_bias, encoder_layers_0 → encoder_norm,
embedding_decoder_bias_embedding, embedding_decoder_bias
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime

DEVICE = runtime.rank_device("cpu")


class EncoderLayer(runtime.Layer):
    """encoder_layers.1, from model.py:123."""

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

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y = self.attention_norm(x)

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
        y = y.transpose(1, 2)
        y = y.flatten(2)
        out = self.attention.out(y)

        x = x + out
        ffn_norm = self.ffn_norm(x)

        # ffn
        up = self.ffn.up(ffn_norm)
        relu = F.relu(up)
        down = self.ffn.down(relu)

        x = x + down
        return x


class EmbeddingDecoderBias(runtime.Layer):
    """embedding+decoder_bias, from model.py:214."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder_norm = nn.RMSNorm(16, eps=1e-06)
        self.embedding = nn.Embedding(96, 16)
        self.decoder_bias = nn.Module()
        self.decoder_bias.weight = nn.Parameter(torch.empty(32, 2))

    def forward(
        self, x: Tensor, decoder_tokens: Tensor, buckets: Tensor, future: Tensor
    ) -> tuple[Tensor, ...]:
        encoder_norm = self.encoder_norm(x)
        embedding = self.embedding(decoder_tokens)

        # decoder_bias
        bias = F.embedding(buckets, self.decoder_bias.weight)
        bias = bias.permute(2, 0, 1)
        bias = bias.unsqueeze(0)
        bias = bias.masked_fill(future, -float("inf"))
        return encoder_norm, embedding, bias


class Stage1(runtime.Stage):
    """Stage 1 of 4 of T5: encoder_layers.1, embedding+decoder_bias."""

    inputs = ("decoder_tokens",)
    receives = ("embedding_encoder_bias", "encoder_layers_0")
    gives = ("encoder_norm", "embedding_decoder_bias_embedding", "embedding_decoder_bias")
    scopes = {
        "encoder_layers_1": "encoder_layers.1",
        "embedding_decoder_bias": "",
    }

    def __init__(self) -> None:
        super().__init__()
        self.encoder_layers_1 = EncoderLayer()
        self.embedding_decoder_bias = EmbeddingDecoderBias()

    def constants(self) -> tuple[Tensor, ...]:
        # Computed once: no input, no parameter.
        positions = torch.arange(12, device=DEVICE)
        unsqueeze = positions.unsqueeze(1)
        positions = positions.unsqueeze(0)
        difference = unsqueeze - positions
        clamp = difference.clamp(0)
        clamp_2 = clamp.clamp(1)
        ratio = clamp_2 / 16
        log2 = torch.log2(ratio)
        product = log2 * 5.333333333333333
        product = product.to(torch.int64)
        total = product + 16
        clamp_2 = total.clamp(max=31)
        below = clamp < 16
        buckets_2 = torch.where(below, clamp, clamp_2)
        future = unsqueeze < positions
        return buckets_2, future

    def forward(
        self, decoder_tokens: Tensor, embedding_encoder_bias: Tensor, encoder_layers_0: Tensor
    ) -> tuple[Tensor, ...]:
        buckets_2, future = self.once

        x = self.encoder_layers_1(encoder_layers_0, embedding_encoder_bias)
        encoder_norm, embedding, bias = self.embedding_decoder_bias(
            x, decoder_tokens, buckets_2, future
        )
        return encoder_norm, embedding, bias
