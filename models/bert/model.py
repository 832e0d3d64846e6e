"""BERT: embeddings, a stack of post-norm layers, and the masked language model's head.

Devlin et al. 2018, "BERT" (arXiv:1810.04805), without the next-sentence head.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler.models.bert.configs import Config


class Embeddings(nn.Module):
    """The normed sum of token, position and token-type embeddings (figure 2 of the paper)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.positions = nn.Embedding(config.sequence, config.hidden)
        self.types = nn.Embedding(config.types, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=config.norm_epsilon)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, types: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions) + self.types(types)
        normed: Tensor = self.dropout(self.norm(x))
        return normed


class Attention(nn.Module):
    """Self-attention over [batch, sequence, hidden], in both directions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_size = config.head_size
        self.dropout = config.dropout
        self.query = nn.Linear(config.hidden, config.hidden)
        self.key = nn.Linear(config.hidden, config.hidden)
        self.value = nn.Linear(config.hidden, config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, sequence, hidden = x.shape
        q = self.query(x).view(batch, sequence, self.heads, self.head_size).transpose(1, 2)
        k = self.key(x).view(batch, sequence, self.heads, self.head_size).transpose(1, 2)
        v = self.value(x).view(batch, sequence, self.heads, self.head_size).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        x = self.out(y.transpose(1, 2).reshape(batch, sequence, hidden))
        return x


class FeedForward(nn.Module):
    """Two linear layers with a gelu between, on each position alone."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, config.ffn_size)
        self.down = nn.Linear(config.ffn_size, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.gelu(self.up(x)))
        return x


class Layer(nn.Module):
    """Attention and feed-forward, each added to its input and normed after."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=config.norm_epsilon)
        self.ffn = FeedForward(config)
        self.ffn_norm = nn.LayerNorm(config.hidden, eps=config.norm_epsilon)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, mask)))
        x = self.ffn_norm(x + self.dropout(self.ffn(x)))
        return x


class BERT(nn.Module):
    """An encoder that fills in masked tokens."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.dense = nn.Linear(config.hidden, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=config.norm_epsilon)
        self.head = nn.Linear(config.hidden, config.vocabulary)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Tie and draw the parameters, with a standard deviation of 0.02 as in the authors' code.

        Call it again after `to_empty`.
        """
        if self.config.tied:
            self.head.weight = self.embeddings.tokens.weight
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        types: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """The mean cross-entropy, or without labels the logits [batch, sequence, vocabulary].

        All arguments are [batch, sequence]. `labels` holds the token where it was masked, and -100
        elsewhere, which counts for nothing. `types` is 0 or 1, by default 0. `mask` is a boolean,
        False at padding; by default there is none.
        """
        types = torch.zeros_like(tokens) if types is None else types
        mask = None if mask is None else mask[:, None, None, :]
        x = self.embeddings(tokens, types)
        for layer in self.layers:
            x = layer(x, mask)
        logits: Tensor = self.head(self.norm(F.gelu(self.dense(x))))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
