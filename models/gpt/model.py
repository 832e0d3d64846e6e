"""GPT: embeddings, a stack of pre-norm layers, a norm and a head.

The architecture is GPT-2's (Radford et al. 2019, "Language Models are Unsupervised Multitask
Learners", section 2.3). GPT-3 (Brown et al. 2020, arXiv:2005.14165) differs in size; its layers of
locally banded attention are dense here.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler.models.gpt.configs import Config


class Attention(nn.Module):
    """Causal self-attention over [batch, sequence, hidden]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_size = config.head_size
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        # The rows of one head lie together, as in Megatron-LM: half the rows are half the heads.
        qkv = self.qkv(x).view(batch, sequence, self.heads, 3 * self.head_size)
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=-1)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = self.out(y.transpose(1, 2).reshape(batch, sequence, hidden))
        return x


class FeedForward(nn.Module):
    """Two linear layers with a gelu between, on each position alone."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, config.ffn_size)
        self.down = nn.Linear(config.ffn_size, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.gelu(self.up(x), approximate="tanh"))
        return x


class Layer(nn.Module):
    """Attention and feed-forward, each normed before and added to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.ffn_norm = nn.LayerNorm(config.hidden)
        self.ffn = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = x + self.dropout(self.ffn(self.ffn_norm(x)))
        return x


class GPT(nn.Module):
    """A decoder that predicts the next token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.positions = nn.Embedding(config.sequence, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Tie and draw the parameters, as in GPT-2; call it again after `to_empty`.

        The standard deviation is 0.02, and that of the layers that write to the residual stream is
        divided by the square root of their number (Radford et al. 2019, section 2.3).
        """
        if self.config.tied:
            self.head.weight = self.embedding.weight
        residual_std = 0.02 / (2 * self.config.layers) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Linear):
                is_residual = name.endswith(("attention.out", "ffn.down"))
                nn.init.normal_(module.weight, std=residual_std if is_residual else 0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """The mean cross-entropy, or without labels the logits [batch, sequence, vocabulary].

        `tokens` and `labels` are integers [batch, sequence]; `labels[b, s]` is what should follow
        `tokens[b, :s + 1]`, and -100 counts for nothing.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.positions(positions))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
