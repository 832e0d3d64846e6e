"""Stage 0 of 4 of T5: embedding+encoder_bias, encoder_layers.0.

tokens → embedding_encoder_bias, encoder_layers_0
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime

DEVICE = runtime.rank_device("cpu")


class EmbeddingEncoderBias(runtime.Block):
    """embedding+encoder_bias, from model.py:214."""

    names = {
        "embedding_weight": "embedding.weight",
        "encoder_bias_weight": "encoder_bias.weight",
    }

    def __init__(self) -> None:
        super().__init__()
        self.embedding_weight = nn.Parameter(torch.empty(96, 16, dtype=torch.float32))
        self.encoder_bias_weight = nn.Parameter(torch.empty(32, 2, dtype=torch.float32))

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        embedding = F.embedding(tokens, self.embedding_weight)

        # encoder_bias
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
        bias = F.embedding(buckets, self.encoder_bias_weight)
        bias = bias.permute(2, 0, 1)
        bias = bias.unsqueeze(0)
        return embedding, bias


class EncoderLayer(runtime.Block):
    """encoder_layers.0, from model.py:123."""

    names = {
        "attention_norm_weight": ".attention_norm.weight",
        "attention_query_weight": ".attention.query.weight",
        "attention_key_weight": ".attention.key.weight",
        "attention_value_weight": ".attention.value.weight",
        "attention_out_weight": ".attention.out.weight",
        "ffn_norm_weight": ".ffn_norm.weight",
        "ffn_up_weight": ".ffn.up.weight",
        "ffn_down_weight": ".ffn.down.weight",
    }

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm_weight = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.attention_query_weight = nn.Parameter(torch.empty(16, 16, dtype=torch.float32))
        self.attention_key_weight = nn.Parameter(torch.empty(16, 16, dtype=torch.float32))
        self.attention_value_weight = nn.Parameter(torch.empty(16, 16, dtype=torch.float32))
        self.attention_out_weight = nn.Parameter(torch.empty(16, 16, dtype=torch.float32))
        self.ffn_norm_weight = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.ffn_up_weight = nn.Parameter(torch.empty(64, 16, dtype=torch.float32))
        self.ffn_down_weight = nn.Parameter(torch.empty(16, 64, dtype=torch.float32))

    def forward(self, embedding: Tensor, bias: Tensor) -> Tensor:
        y = F.rms_norm(embedding, (16,), self.attention_norm_weight, 1e-06)

        # attention
        query = F.linear(y, self.attention_query_weight)
        q = query.view(2, 12, 2, 8)
        q = q.transpose(1, 2)
        key = F.linear(y, self.attention_key_weight)
        k = key.view(2, 12, 2, 8)
        k = k.transpose(1, 2)
        value = F.linear(y, self.attention_value_weight)
        v = value.view(2, 12, 2, 8)
        v = v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        x = y.transpose(1, 2)
        x = x.flatten(2)
        x = F.linear(x, self.attention_out_weight)

        x = embedding + x
        ffn_norm = F.rms_norm(x, (16,), self.ffn_norm_weight, 1e-06)

        # ffn
        up = F.linear(ffn_norm, self.ffn_up_weight)
        relu = F.relu(up)
        down = F.linear(relu, self.ffn_down_weight)

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

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        embedding, bias = self.embedding_encoder_bias(tokens)
        x = self.encoder_layers_0(embedding, bias)
        return bias, x
