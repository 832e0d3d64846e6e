"""Sizes of BERT: the two of the paper, and a tiny one.

>>> PRESETS["large"].head_size, PRESETS["large"].ffn_size
(64, 4096)
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of one BERT. `sequence` is the largest one: positions are learned."""

    layers: int = 4
    heads: int = 4
    hidden: int = 256
    vocabulary: int = 4096
    sequence: int = 256
    types: int = 2
    """Number of token types: sentence A and sentence B."""
    ffn: int | None = None
    """Width of the feed-forward layer; None: 4 * hidden."""
    tied: bool = True
    """The head shares its weight with the token embedding."""
    dropout: float = 0.0
    norm_epsilon: float = 1e-12

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            msg = f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})"
            raise ValueError(msg)

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layer."""
        return 4 * self.hidden if self.ffn is None else self.ffn


def _bert(layers: int, heads: int, hidden: int) -> Config:
    return Config(layers, heads, hidden, vocabulary=30522, sequence=512, dropout=0.1)


# Devlin et al. 2018, "BERT" (arXiv:1810.04805), section 3 (model architecture) and appendix A.2
# (dropout); the vocabulary is that of the released uncased models.
PRESETS: dict[str, Config] = {
    "tiny": Config(layers=2, heads=4, hidden=64, vocabulary=256, sequence=32),
    "base": _bert(12, 12, 768),
    "large": _bert(24, 16, 1024),
}
