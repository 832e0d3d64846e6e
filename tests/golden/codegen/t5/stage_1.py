"""Stage 1 of 4 of T5: encoder_layers.1, embedding+decoder_bias.

decoder_tokens, embedding_encoder_bias, encoder_layers_0 → encoder_norm,
embedding_decoder_bias_embedding, embedding_decoder_bias
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime

DEVICE = runtime.rank_device("cpu")


class EncoderLayer(runtime.Block):
    """encoder_layers.1, from model.py:123."""

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

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y = F.rms_norm(x, (16,), self.attention_norm_weight, 1e-06)

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
        y = y.transpose(1, 2)
        y = y.flatten(2)
        out = F.linear(y, self.attention_out_weight)

        x = x + out
        ffn_norm = F.rms_norm(x, (16,), self.ffn_norm_weight, 1e-06)

        # ffn
        up = F.linear(ffn_norm, self.ffn_up_weight)
        relu = F.relu(up)
        down = F.linear(relu, self.ffn_down_weight)

        x = x + down
        return x


class EmbeddingDecoderBias(runtime.Block):
    """embedding+decoder_bias, from model.py:214."""

    names = {
        "encoder_norm_weight": "encoder_norm.weight",
        "embedding_weight": "embedding.weight",
        "decoder_bias_weight": "decoder_bias.weight",
    }

    def __init__(self) -> None:
        super().__init__()
        self.encoder_norm_weight = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.embedding_weight = nn.Parameter(torch.empty(96, 16, dtype=torch.float32))
        self.decoder_bias_weight = nn.Parameter(torch.empty(32, 2, dtype=torch.float32))

    def forward(self, x: Tensor, decoder_tokens: Tensor) -> tuple[Tensor, ...]:
        encoder_norm = F.rms_norm(x, (16,), self.encoder_norm_weight, 1e-06)
        embedding = F.embedding(decoder_tokens, self.embedding_weight)

        # decoder_bias
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
        buckets = torch.where(below, clamp, clamp_2)
        bias = F.embedding(buckets, self.decoder_bias_weight)
        bias = bias.permute(2, 0, 1)
        bias = bias.unsqueeze(0)
        future = unsqueeze < positions
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

    def forward(
        self, decoder_tokens: Tensor, embedding_encoder_bias: Tensor, encoder_layers_0: Tensor
    ) -> tuple[Tensor, ...]:
        x = self.encoder_layers_1(encoder_layers_0, embedding_encoder_bias)
        encoder_norm, embedding, bias = self.embedding_decoder_bias(x, decoder_tokens)
        return encoder_norm, embedding, bias
