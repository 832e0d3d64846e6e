"""T5: an encoder, a decoder that looks at its output, and relative positions in both.

Raffel et al. 2019, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer" (arXiv:1910.10683), section 2.1; version 1.0, with relu and without gates.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler.models.t5.configs import Config


def distance_buckets(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """The bucket of each distance, integers: a bucket each for small ones, then ever wider ones.

    The width grows with the logarithm; the distances from `max_distance` on share the last bucket.

    >>> distance_buckets(torch.tensor([0, 1, 2, 3, 4, 5, 6, 8, 12, 99]), 8, 16)
    tensor([0, 1, 2, 3, 4, 4, 5, 6, 7, 7])
    """
    exact = buckets // 2
    scale = (buckets - exact) / math.log2(max_distance / exact)
    # log2 is exact where a bucket begins at a power of two, whatever the precision.
    log = torch.log2(distance.clamp(min=1) / exact) * scale
    wide = (exact + log.long()).clamp(max=buckets - 1)
    return torch.where(distance < exact, distance, wide)


def relative_buckets(positions: Tensor, config: Config, causal: bool) -> Tensor:
    """The bucket of each key seen from each query, integers [queries, keys].

    A causal decoder spends all buckets on keys before the query; an encoder spends the second half
    of them on keys after it.
    """
    distance = positions[:, None] - positions[None, :]
    if causal:
        return distance_buckets(distance.clamp(min=0), config.buckets, config.max_distance)
    half = config.buckets // 2
    buckets = distance_buckets(distance.abs(), half, config.max_distance)
    return torch.where(distance < 0, half + buckets, buckets)


class RelativeBias(nn.Module):
    """A learned number for each head and distance, added to the scores of every layer."""

    def __init__(self, config: Config, causal: bool) -> None:
        super().__init__()
        self.config = config
        self.causal = causal
        self.weight = nn.Parameter(torch.empty(config.buckets, config.heads))

    def forward(self, x: Tensor) -> Tensor:
        """The bias [1, heads, sequence, sequence] for x [batch, sequence, hidden]."""
        positions = torch.arange(x.shape[1], device=x.device)
        buckets = relative_buckets(positions, self.config, self.causal)
        bias = F.embedding(buckets, self.weight).permute(2, 0, 1).unsqueeze(0)
        if self.causal:
            future = positions[:, None] < positions[None, :]
            bias = bias.masked_fill(future, float("-inf"))
        return bias


class Attention(nn.Module):
    """Attention from x [batch, queries, hidden] to source [batch, keys, hidden], without a scale.

    What the scale would do is done by the initialisation of the query, as in Mesh TensorFlow.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_size = config.head_size
        self.dropout = config.dropout
        inner = config.heads * config.head_size
        self.query = nn.Linear(config.hidden, inner, bias=False)
        self.key = nn.Linear(config.hidden, inner, bias=False)
        self.value = nn.Linear(config.hidden, inner, bias=False)
        self.out = nn.Linear(inner, config.hidden, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """[batch, sequence, heads * head_size] as [batch, heads, sequence, head_size]."""
        return x.view(*x.shape[:2], self.heads, self.head_size).transpose(1, 2)

    def forward(self, x: Tensor, source: Tensor, bias: Tensor | None = None) -> Tensor:
        q = self.split(self.query(x))
        k = self.split(self.key(source))
        v = self.split(self.value(source))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=1.0)
        x = self.out(y.transpose(1, 2).flatten(2))
        return x


class FeedForward(nn.Module):
    """Two linear layers with a relu between, on each position alone."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, config.ffn_size, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        self.down = nn.Linear(config.ffn_size, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.dropout(F.relu(self.up(x))))
        return x


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each normed before and added to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_epsilon)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden, eps=config.norm_epsilon)
        self.ffn = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.dropout(self.attention(y, y, bias))
        x = x + self.dropout(self.ffn(self.ffn_norm(x)))
        return x


class DecoderLayer(nn.Module):
    """As in the encoder, with attention to the encoder's output between."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_epsilon)
        self.attention = Attention(config)
        self.cross_norm = nn.RMSNorm(config.hidden, eps=config.norm_epsilon)
        self.cross = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden, eps=config.norm_epsilon)
        self.ffn = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, encoded: Tensor, bias: Tensor) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.dropout(self.attention(y, y, bias))
        x = x + self.dropout(self.cross(self.cross_norm(x), encoded))
        x = x + self.dropout(self.ffn(self.ffn_norm(x)))
        return x


class T5(nn.Module):
    """An encoder that reads one text and a decoder that writes another."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder_bias = RelativeBias(config, causal=False)
        self.encoder_layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))
        self.encoder_norm = nn.RMSNorm(config.hidden, eps=config.norm_epsilon)
        self.decoder_bias = RelativeBias(config, causal=True)
        self.decoder_layers = nn.ModuleList(
            DecoderLayer(config) for _ in range(config.num_decoder_layers)
        )
        self.decoder_norm = nn.RMSNorm(config.hidden, eps=config.norm_epsilon)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Tie and draw the parameters, as in Mesh TensorFlow's T5; call it again after `to_empty`.

        A linear layer keeps the variance of its input; the query is also divided by the square root
        of the head's width, which stands for the scale that attention lacks.
        """
        if self.config.tied:
            self.head.weight = self.embedding.weight
        for name, module in self.named_modules():
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, RelativeBias):
                nn.init.normal_(module.weight, std=self.config.hidden**-0.5)
            elif isinstance(module, nn.Linear):
                scale = self.config.head_size if name.endswith("query") else 1
                nn.init.normal_(module.weight, std=(module.in_features * scale) ** -0.5)
        nn.init.normal_(self.embedding.weight, std=1.0)

    def encode(self, tokens: Tensor) -> Tensor:
        """The encoder's output [batch, sequence, hidden]."""
        x: Tensor = self.dropout(self.embedding(tokens))
        bias = self.encoder_bias(x)
        for layer in self.encoder_layers:
            x = layer(x, bias)
        x = self.dropout(self.encoder_norm(x))
        return x

    def decode(self, tokens: Tensor, encoded: Tensor) -> Tensor:
        """The decoder's output [batch, sequence, hidden]."""
        x: Tensor = self.dropout(self.embedding(tokens))
        bias = self.decoder_bias(x)
        for layer in self.decoder_layers:
            x = layer(x, encoded, bias)
        x = self.dropout(self.decoder_norm(x))
        return x

    def forward(
        self, tokens: Tensor, decoder_tokens: Tensor, labels: Tensor | None = None
    ) -> Tensor:
        """The mean cross-entropy, or without labels the logits [batch, sequence, vocabulary].

        All arguments are integers [batch, sequence]; the encoder's sequence and the decoder's may
        differ. `labels[b, s]` is what should follow `decoder_tokens[b, :s + 1]`, and -100 counts
        for nothing.
        """
        x = self.decode(decoder_tokens, self.encode(tokens))
        if self.config.tied:
            x = x * self.config.hidden**-0.5  # the embedding has variance 1
        logits: Tensor = self.head(x)
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
