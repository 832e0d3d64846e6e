"""Sizes of a mixture of experts: those of a GPT, and its experts.

>>> PRESETS["1.1t"].experts, PRESETS["1.1t"].ffn_size
(512, 16384)
>>> Config(experts=8, top_k=2, capacity=1.25).slots(256)
80
"""

import math
from dataclasses import dataclass

from parcompiler.models import gpt


@dataclass(frozen=True, slots=True)
class Config(gpt.Config):
    """Sizes of one mixture; `ffn` is the width of one expert."""

    experts: int = 8
    """Experts of a sparse layer."""
    top_k: int = 2
    """Experts that a token is sent to."""
    every: int = 1
    """One layer in so many is sparse, the last of them; the others are those of a GPT."""
    capacity: float = 1.25
    """Places of an expert for each token that it gets when all get the same number."""
    balance: float = 0.01
    """What the loss adds for uneven use of the experts; 0: nothing."""

    def __post_init__(self) -> None:
        gpt.Config.__post_init__(self)
        if not 1 <= self.top_k <= self.experts:
            msg = f"top_k ({self.top_k}) must be from 1 to experts ({self.experts})"
            raise ValueError(msg)
        if self.every < 1:
            msg = f"every ({self.every}) must be at least 1"
            raise ValueError(msg)
        if self.capacity <= 0:
            msg = f"capacity ({self.capacity}) must be more than 0"
            raise ValueError(msg)

    def is_sparse(self, layer: int) -> bool:
        """Whether layer number `layer` has experts."""
        return (layer + 1) % self.every == 0

    def slots(self, sequence: int) -> int:
        """Places of one expert for the tokens of a sequence; no token needs two of them."""
        return min(sequence, math.ceil(self.capacity * self.top_k * sequence / self.experts))


def _fairseq(layers: int, heads: int, hidden: int) -> Config:
    return Config(
        layers, heads, hidden, vocabulary=50257, sequence=2048, experts=512, top_k=2, every=2
    )


# Artetxe et al. 2021, "Efficient Large Scale Language Modeling with Mixtures of Experts"
# (arXiv:2112.10684), table 1; positions are learned here.
PRESETS: dict[str, Config] = {
    "tiny": Config(layers=2, heads=4, hidden=64, vocabulary=256, sequence=32, experts=4, ffn=128),
    "15b": _fairseq(12, 12, 768),
    "52b": _fairseq(24, 16, 1024),
    "207b": _fairseq(24, 16, 2048),
    "1.1t": _fairseq(32, 32, 4096),
}
