"""DLRM: rows of tables and a vector made of numbers, multiplied with one another.

Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation
Systems" (arXiv:1906.00091), section 2.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler.models.dlrm.configs import Config


class Stack(nn.Module):
    """Linear layers with a relu between, and one behind the last where `ends` does not."""

    def __init__(self, widths: tuple[int, ...], *, ends: bool) -> None:
        super().__init__()
        self.ends = ends
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers, start=1):
            x = layer(x)
            if index < len(self.layers) or not self.ends:
                x = F.relu(x)
        return x


class Interaction(nn.Module):
    """The product of each pair of features, behind the vector of the numbers."""

    def forward(self, x: Tensor, rows: list[Tensor]) -> Tensor:
        """[batch, hidden] each, to [batch, hidden + pairs]."""
        features = torch.stack([x, *rows], dim=1)
        products = features @ features.transpose(1, 2)
        first, second = torch.tril_indices(len(rows) + 1, len(rows) + 1, -1, device=x.device)
        return torch.cat([x, products[:, first, second]], dim=1)


class DLRM(nn.Module):
    """Predicts whether an advertisement is clicked."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.bottom = Stack((config.numbers, *config.bottom, config.hidden), ends=False)
        self.tables = nn.ModuleList(
            nn.Embedding(rows, config.hidden, sparse=config.sparse) for rows in config.tables
        )
        self.interaction = Interaction()
        self.top = Stack((config.hidden + config.pairs, *config.top, 1), ends=True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters, as in the authors' code; call it again after `to_empty`."""
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                bound = module.num_embeddings**-0.5
                nn.init.uniform_(module.weight, -bound, bound)
            elif isinstance(module, nn.Linear):
                inputs, outputs = module.in_features, module.out_features
                nn.init.normal_(module.weight, std=(2 / (inputs + outputs)) ** 0.5)
                nn.init.normal_(module.bias, std=outputs**-0.5)

    def forward(self, numbers: Tensor, categories: Tensor, labels: Tensor | None = None) -> Tensor:
        """The mean binary cross-entropy, or without labels the logits [batch].

        `numbers` are [batch, numbers]; `categories` integers [batch, tables], a row of each table;
        `labels` [batch] are 0 or 1, of the type of `numbers`.
        """
        x = self.bottom(numbers)
        rows = [table(own) for table, own in zip(self.tables, categories.unbind(1), strict=True)]
        logits: Tensor = self.top(self.interaction(x, rows)).squeeze(1)
        if labels is None:
            return logits
        return F.binary_cross_entropy_with_logits(logits, labels)
