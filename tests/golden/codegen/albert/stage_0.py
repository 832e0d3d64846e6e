"""Stage 0 of 2 of Albert: words, layers.0.

tokens → layers_0_3
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime


class Words(runtime.Block):
    """words, from models.py:36."""

    names = {
        "words_weight": "words.weight",
    }

    def __init__(self) -> None:
        super().__init__()
        self.words_weight = nn.Parameter(torch.empty(20, 8, dtype=torch.float32))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = F.embedding(tokens, self.words_weight)
        return hidden


class SharedLayer(runtime.Block):
    """layers.0, layers.0@1, layers.0@2, from models.py:19."""

    names = {
        "norm_weight": ".norm.weight",
        "norm_bias": ".norm.bias",
        "dense_weight": ".dense.weight",
        "dense_bias": ".dense.bias",
    }

    def __init__(self) -> None:
        super().__init__()
        self.norm_weight = nn.Parameter(torch.empty(8, dtype=torch.float32))
        self.norm_bias = nn.Parameter(torch.empty(8, dtype=torch.float32))
        self.dense_weight = nn.Parameter(torch.empty(8, 8, dtype=torch.float32))
        self.dense_bias = nn.Parameter(torch.empty(8, dtype=torch.float32))

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        norm = F.layer_norm(hidden, (8,), self.norm_weight, self.norm_bias, 1e-05)
        dense = F.linear(norm, self.dense_weight, self.dense_bias)
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
