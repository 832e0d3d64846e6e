"""Stage 1 of 2 of Albert: layers.0, words#2.

tokens, labels, layers_0_3 → the loss
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime


class SharedLayer(runtime.Layer):
    """layers.0@3, from models.py:19."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.dense = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        norm = self.norm(hidden)
        dense = self.dense(norm)
        inner = torch.tanh(dense)
        product = inner * mask
        hidden = hidden + product
        return hidden


class Words_2(runtime.Layer):
    """words#2, from models.py:39."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Module()
        self.words.weight = nn.Parameter(torch.empty(20, 8))

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(hidden, self.words.weight)
        logits = logits.flatten(end_dim=1)
        labels = labels.flatten()
        loss = F.cross_entropy(logits, labels)
        return loss


class Stage1(runtime.Stage):
    """Stage 1 of 2 of Albert: layers.0, words#2."""

    inputs = ("tokens", "labels")
    receives = ("layers_0_3",)
    loss = True
    scopes = {
        "layers_0_4": "layers.0",
        "words_2": "",
    }

    def __init__(self) -> None:
        super().__init__()
        self.layers_0_4 = SharedLayer()
        self.words_2 = Words_2()

    def forward(self, tokens: Tensor, labels: Tensor, layers_0_3: Tensor) -> Tensor:
        # Computed here, not received: no parameters, no gradient.
        mask = tokens > 0
        mask = mask.unsqueeze(-1)

        hidden = self.layers_0_4(layers_0_3, mask)
        loss = self.words_2(hidden, labels)
        return loss
