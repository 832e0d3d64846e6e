"""Stage 3 of 4 of T5: decoder_layers.1, decoder_norm+embedding.

labels, encoder_norm, embedding_decoder_bias, decoder_layers_0 → the loss
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime


class DecoderLayer(runtime.Block):
    """decoder_layers.1, from model.py:143."""

    names = {
        "attention_norm_weight": ".attention_norm.weight",
        "attention_query_weight": ".attention.query.weight",
        "attention_key_weight": ".attention.key.weight",
        "attention_value_weight": ".attention.value.weight",
        "attention_out_weight": ".attention.out.weight",
        "cross_norm_weight": ".cross_norm.weight",
        "cross_query_weight": ".cross.query.weight",
        "cross_key_weight": ".cross.key.weight",
        "cross_value_weight": ".cross.value.weight",
        "cross_out_weight": ".cross.out.weight",
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
        self.cross_norm_weight = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.cross_query_weight = nn.Parameter(torch.empty(16, 16, dtype=torch.float32))
        self.cross_key_weight = nn.Parameter(torch.empty(16, 16, dtype=torch.float32))
        self.cross_value_weight = nn.Parameter(torch.empty(16, 16, dtype=torch.float32))
        self.cross_out_weight = nn.Parameter(torch.empty(16, 16, dtype=torch.float32))
        self.ffn_norm_weight = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.ffn_up_weight = nn.Parameter(torch.empty(64, 16, dtype=torch.float32))
        self.ffn_down_weight = nn.Parameter(torch.empty(16, 64, dtype=torch.float32))

    def forward(self, x: Tensor, bias: Tensor, encoder_norm: Tensor) -> Tensor:
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
        cross_norm = F.rms_norm(x, (16,), self.cross_norm_weight, 1e-06)

        # cross
        query = F.linear(cross_norm, self.cross_query_weight)
        q = query.view(2, 12, 2, 8)
        q = q.transpose(1, 2)
        key = F.linear(encoder_norm, self.cross_key_weight)
        k = key.view(2, 12, 2, 8)
        k = k.transpose(1, 2)
        value = F.linear(encoder_norm, self.cross_value_weight)
        v = value.view(2, 12, 2, 8)
        v = v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        y = y.transpose(1, 2)
        y = y.flatten(2)
        out = F.linear(y, self.cross_out_weight)

        x = x + out
        ffn_norm = F.rms_norm(x, (16,), self.ffn_norm_weight, 1e-06)

        # ffn
        up = F.linear(ffn_norm, self.ffn_up_weight)
        relu = F.relu(up)
        down = F.linear(relu, self.ffn_down_weight)

        x = x + down
        return x


class DecoderNormEmbedding(runtime.Block):
    """decoder_norm+embedding, from model.py:214."""

    names = {
        "decoder_norm_weight": "decoder_norm.weight",
        "embedding_weight": "embedding.weight",
    }

    def __init__(self) -> None:
        super().__init__()
        self.decoder_norm_weight = nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.embedding_weight = nn.Parameter(torch.empty(96, 16, dtype=torch.float32))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = F.rms_norm(x, (16,), self.decoder_norm_weight, 1e-06)
        x = x * 0.25
        logits = F.linear(x, self.embedding_weight)
        logits = logits.flatten(end_dim=1)
        labels = labels.flatten()
        loss = F.cross_entropy(logits, labels)
        return loss


class Stage3(runtime.Stage):
    """Stage 3 of 4 of T5: decoder_layers.1, decoder_norm+embedding."""

    inputs = ("labels",)
    receives = ("encoder_norm", "embedding_decoder_bias", "decoder_layers_0")
    loss = True
    scopes = {
        "decoder_layers_1": "decoder_layers.1",
        "decoder_norm_embedding": "",
    }

    def __init__(self) -> None:
        super().__init__()
        self.decoder_layers_1 = DecoderLayer()
        self.decoder_norm_embedding = DecoderNormEmbedding()

    def forward(
        self,
        labels: Tensor,
        encoder_norm: Tensor,
        embedding_decoder_bias: Tensor,
        decoder_layers_0: Tensor,
    ) -> Tensor:
        x = self.decoder_layers_1(decoder_layers_0, embedding_decoder_bias, encoder_norm)
        loss = self.decoder_norm_embedding(x, labels)
        return loss
