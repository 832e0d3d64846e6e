"""Llama: a decoder with rotary positions, RMS norms, gated feed-forward and grouped queries.

Touvron et al. 2023, "Llama 2" (arXiv:2307.09288), section 2.2; Grattafiori et al. 2024, "The Llama
3 Herd of Models" (arXiv:2407.21783), section 3.2.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler.models.llama.configs import Config


def rotary_angles(config: Config) -> Tensor:
    """Angle of each position and pair of channels, float64 [sequence, head_size / 2].

    Su et al. 2021, "RoFormer" (arXiv:2104.09864), section 3.2.2.
    """
    channels = torch.arange(0, config.head_size, 2, dtype=torch.float64, device="cpu")
    positions = torch.arange(config.sequence, dtype=torch.float64, device="cpu")
    return torch.outer(positions, config.rope_theta ** (-channels / config.head_size))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the channel pairs of x [..., sequence, head_size] by the angles of their positions.

    A pair is a channel of the first half and one of the second, as in the Hugging Face checkpoints.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention over [batch, sequence, hidden]; several queries share a key."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.heads = config.heads
        self.kv_heads = config.num_kv_heads
        kv_size = config.num_kv_heads * config.head_size
        self.query = nn.Linear(config.hidden, config.hidden, bias=False)
        self.key = nn.Linear(config.hidden, kv_size, bias=False)
        self.value = nn.Linear(config.hidden, kv_size, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        q = self.query(x).view(batch, sequence, self.heads, self.head_size).transpose(1, 2)
        k = self.key(x).view(batch, sequence, self.kv_heads, self.head_size).transpose(1, 2)
        v = self.value(x).view(batch, sequence, self.kv_heads, self.head_size).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = self.kv_heads < self.heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = self.out(y.transpose(1, 2).reshape(batch, sequence, hidden))
        return x


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202), on each position alone."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.ffn_size, bias=False)
        self.up = nn.Linear(config.hidden, config.ffn_size, bias=False)
        self.down = nn.Linear(config.ffn_size, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.silu(self.gate(x)) * self.up(x))
        return x


class Layer(nn.Module):
    """Attention and feed-forward, each normed before and added to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_epsilon)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden, eps=config.norm_epsilon)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        x = x + self.ffn(self.ffn_norm(x))
        return x


class Llama(nn.Module):
    """A decoder that predicts the next token."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_epsilon)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        # Buffers, so that `.double()` and `.to(device)` take them along.
        table = (config.sequence, config.head_size // 2)
        self.register_buffer("cos", torch.empty(table), persistent=False)
        self.register_buffer("sin", torch.empty(table), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Tie and draw the parameters and fill the rotary tables; call it again after `to_empty`.

        The Llama papers give no initialisation. This is GPT-2's: a standard deviation of 0.02, for
        layers that write to the residual stream divided by the square root of their number.
        """
        if self.config.tied:
            self.head.weight = self.embedding.weight
        residual_std = 0.02 / (2 * self.config.layers) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Embedding | nn.Linear):
                is_residual = name.endswith(("attention.out", "ffn.down"))
                nn.init.normal_(module.weight, std=residual_std if is_residual else 0.02)
        angles = rotary_angles(self.config)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """The mean cross-entropy, or without labels the logits [batch, sequence, vocabulary].

        `tokens` and `labels` are integers [batch, sequence]; `labels[b, s]` is what should follow
        `tokens[b, :s + 1]`, and -100 counts for nothing.
        """
        sequence = tokens.shape[1]
        cos, sin = self.cos[:sequence], self.sin[:sequence]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
