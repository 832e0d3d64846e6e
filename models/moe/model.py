"""A mixture of experts: a GPT in which a router sends each token to a few of many experts.

Shazeer et al. 2017, "Outrageously Large Neural Networks" (arXiv:1701.06538); the dispatch and the
places of experts are those of Lepikhin et al. 2020, "GShard" (arXiv:2006.16668), algorithm 1, and
the loss for balance that of Fedus et al. 2021, "Switch Transformers" (arXiv:2101.03961), section
2.2. An expert takes the tokens of a sequence in order, so that no token depends on a later one.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler.models.gpt.model import Attention, FeedForward
from parcompiler.models.moe.configs import Config


class Router(nn.Module):
    """Chooses `top_k` experts for each token, and gives it a place at each of them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.scores = nn.Linear(config.hidden, config.experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where the tokens of x [batch, sequence, hidden] go.

        Two tensors [batch, sequence, experts, slots]: 1 at the places that a token has, and its
        weight there; a token that comes to an expert with no place left has none. Then how unevenly
        experts are chosen: 1 when all are chosen alike.
        """
        scores = F.softmax(self.scores(x), dim=-1)
        best = scores.topk(self.config.top_k, dim=-1).indices
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
        weights = scores * chosen
        weights = weights / weights.sum(dim=-1, keepdim=True)
        # The number of a token among those that its expert gets is its place there.
        number = chosen.cumsum(dim=1).masked_fill(~chosen, 0)
        slots = torch.arange(1, self.config.slots(x.shape[1]) + 1, device=x.device)
        places = (number.unsqueeze(-1) == slots).to(x.dtype)
        share = chosen.to(x.dtype).mean(dim=(0, 1)) / self.config.top_k
        uneven = self.config.experts * (share * scores.mean(dim=(0, 1))).sum()
        return places, places * weights.unsqueeze(-1), uneven


class Experts(nn.Module):
    """Feed-forward layers of equal sizes, side by side in stacked matrices."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        experts, hidden, ffn = config.experts, config.hidden, config.ffn_size
        self.up = nn.Parameter(torch.empty(experts, hidden, ffn))
        self.up_bias = nn.Parameter(torch.empty(experts, 1, 1, ffn))
        self.down = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.down_bias = nn.Parameter(torch.empty(experts, 1, 1, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Each expert on its own of x [experts, batch, slots, hidden]."""
        x = torch.einsum("ebch,ehf->ebcf", x, self.up) + self.up_bias
        x = torch.einsum("ebcf,efh->ebch", F.gelu(x, approximate="tanh"), self.down)
        return x + self.down_bias


class Mixture(nn.Module):
    """A router and its experts: x [batch, sequence, hidden] to the same, and how uneven it is."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        places, weights, uneven = self.router(x)
        y = self.experts(torch.einsum("bsec,bsh->ebch", places, x))
        x = torch.einsum("bsec,ebch->bsh", weights, y)
        return x, uneven


class Layer(nn.Module):
    """Attention and feed-forward, each normed before and added to its input."""

    def __init__(self, config: Config, *, sparse: bool) -> None:
        super().__init__()
        self.sparse = sparse
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.ffn_norm = nn.LayerNorm(config.hidden)
        self.ffn = Mixture(config) if sparse else FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, uneven: Tensor) -> tuple[Tensor, Tensor]:
        """The next x; and the sum of what routers of earlier layers found uneven, with its own."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        y = self.ffn(self.ffn_norm(x))
        if self.sparse:
            y, own = y
            uneven = uneven + own
        x = x + self.dropout(y)
        return x, uneven


class MoE(nn.Module):
    """A decoder that predicts the next token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.positions = nn.Embedding(config.sequence, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        sparse = [config.is_sparse(layer) for layer in range(config.layers)]
        self.num_sparse = sum(sparse)
        self.layers = nn.ModuleList(Layer(config, sparse=own) for own in sparse)
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Tie and draw the parameters, as in GPT-2; call it again after `to_empty`."""
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
            elif isinstance(module, Experts):
                nn.init.normal_(module.up, std=0.02)
                nn.init.normal_(module.down, std=residual_std)
                nn.init.zeros_(module.up_bias)
                nn.init.zeros_(module.down_bias)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """The mean cross-entropy, or without labels the logits [batch, sequence, vocabulary].

        `tokens` and `labels` are integers [batch, sequence]; `labels[b, s]` is what should follow
        `tokens[b, :s + 1]`, and -100 counts for nothing. In training the loss has `balance` times
        the mean unevenness of the routers added to it.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.positions(positions))
        uneven = torch.zeros((), dtype=x.dtype, device=x.device)
        for layer in self.layers:
            x, uneven = layer(x, uneven)
        logits: Tensor = self.head(self.norm(x))
        if labels is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if self.training and self.num_sparse and self.config.balance:
            loss = loss + self.config.balance / self.num_sparse * uneven
        return loss
