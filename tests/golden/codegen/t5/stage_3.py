"""Stage 3 of 4 of T5: decoder_layers.1, decoder_norm+embedding.

labels, encoder_norm, embedding_decoder_bias, decoder_layers_0 → the loss
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime


class DecoderLayer(runtime.Layer):
    """decoder_layers.1, from model.py:143."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(16, eps=1e-06)
        self.attention = nn.Module()
        self.attention.query = nn.Linear(16, 16, bias=False)
        self.attention.key = nn.Linear(16, 16, bias=False)
        self.attention.value = nn.Linear(16, 16, bias=False)
        self.attention.out = nn.Linear(16, 16, bias=False)
        self.cross_norm = nn.RMSNorm(16, eps=1e-06)
        self.cross = nn.Module()
        self.cross.query = nn.Linear(16, 16, bias=False)
        self.cross.key = nn.Linear(16, 16, bias=False)
        self.cross.value = nn.Linear(16, 16, bias=False)
        self.cross.out = nn.Linear(16, 16, bias=False)
        self.ffn_norm = nn.RMSNorm(16, eps=1e-06)
        self.ffn = nn.Module()
        self.ffn.up = nn.Linear(16, 64, bias=False)
        self.ffn.down = nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor, bias: Tensor, encoder_norm: Tensor) -> Tensor:
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
        cross_norm = self.cross_norm(x)

        # cross
        query = self.cross.query(cross_norm)
        q = query.view(*query.shape[:2], 2, 8)
        q = q.transpose(1, 2)
        key = self.cross.key(encoder_norm)
        k = key.view(*key.shape[:2], 2, 8)
        k = k.transpose(1, 2)
        value = self.cross.value(encoder_norm)
        v = value.view(*value.shape[:2], 2, 8)
        v = v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        y = y.transpose(1, 2)
        y = y.flatten(2)
        out = self.cross.out(y)

        x = x + out
        ffn_norm = self.ffn_norm(x)

        # ffn
        up = self.ffn.up(ffn_norm)
        relu = F.relu(up)
        down = self.ffn.down(relu)

        x = x + down
        return x


class DecoderNormEmbedding(runtime.Layer):
    """decoder_norm+embedding, from model.py:214."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder_norm = nn.RMSNorm(16, eps=1e-06)
        self.embedding = nn.Module()
        self.embedding.weight = nn.Parameter(torch.empty(96, 16))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.decoder_norm(x)
        x = x * 0.25
        logits = F.linear(x, self.embedding.weight)
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
