"""Stage 0 of 2 of Albert: words, layers.0.

tokens → layers_0_3
"""

import torch
from torch import Tensor, nn

from parcompiler import runtime


class Words(runtime.Layer):
    """words, from models.py:36."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        return hidden


class SharedLayer(runtime.Layer):
    """layers.0, layers.0@1, layers.0@2, from models.py:19."""

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


class Stage0(runtime.Stage):
    """Stage 0 of 2 of Albert: words, layers.0."""

    inputs = ("tokens",)
    gives = ("layers_0_3",)
    scopes = {
        "words": "",
        "layers_0": "layers.0",
    }

    def __init__(self) -> None:
        super().__init__()
        self.words = Words()
        self.layers_0 = SharedLayer()

    def forward(self, tokens: Tensor) -> Tensor:
        # Computed here, not received: no parameters, no gradient.
        mask = tokens > 0
        mask = mask.unsqueeze(-1)

        hidden = self.words(tokens)
        for _ in range(3):
            hidden = self.layers_0(hidden, mask)
        return hidden
