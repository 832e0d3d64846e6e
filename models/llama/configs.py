"""Sizes of Llama: the tables of the Llama 2 and Llama 3 papers, and a tiny one.

>>> PRESETS["70b"].num_kv_heads, PRESETS["7b"].num_kv_heads
(8, 32)
>>> Config(hidden=4096, heads=32).ffn_size
11008
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of one Llama. `sequence` is the length of the rotary tables."""

    layers: int = 4
    heads: int = 4
    hidden: int = 256
    vocabulary: int = 4096
    sequence: int = 256
    kv_heads: int | None = None
    """Heads of the keys and values (Ainslie et al. 2023, arXiv:2305.13245); None: heads."""
    ffn: int | None = None
    """Width of the feed-forward layer; None: 8/3 * hidden, rounded up to a multiple of 256."""
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5
    tied: bool = False
    """The head shares its weight with the token embedding."""

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads):
            msg = f"hidden ({self.hidden}) must be an even multiple of heads ({self.heads})"
            raise ValueError(msg)
        if self.heads % self.num_kv_heads:
            msg = f"heads ({self.heads}) must be a multiple of kv_heads ({self.num_kv_heads})"
            raise ValueError(msg)

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def num_kv_heads(self) -> int:
        """Number of heads of the keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layer."""
        return -(-8 * self.hidden // 3 // 256) * 256 if self.ffn is None else self.ffn


def _llama2(layers: int, heads: int, hidden: int, kv_heads: int, ffn: int) -> Config:
    return Config(layers, heads, hidden, 32000, 4096, kv_heads, ffn)


def _llama3(layers: int, heads: int, hidden: int, kv_heads: int, ffn: int) -> Config:
    return Config(layers, heads, hidden, 128256, 8192, kv_heads, ffn, rope_theta=500000.0)


PRESETS: dict[str, Config] = {
    "tiny": Config(layers=2, heads=4, hidden=64, vocabulary=256, sequence=32, kv_heads=2, ffn=128),
    # Touvron et al. 2023, "Llama 2" (arXiv:2307.09288), table 1 and section 2.2; the widths are
    # those of the released checkpoints.
    "7b": _llama2(32, 32, 4096, 32, 11008),
    "13b": _llama2(40, 40, 5120, 40, 13824),
    "70b": _llama2(80, 64, 8192, 8, 28672),
    # Grattafiori et al. 2024, "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3, with the
    # 256 special tokens that the released checkpoints add. The sequence is that of pre-training
    # (section 3.4.1); the longer one of 3.1 came in a later phase.
    "3-8b": _llama3(32, 32, 4096, 8, 14336),
    "3-70b": _llama3(80, 64, 8192, 8, 28672),
    "3.1-405b": _llama3(126, 128, 16384, 8, 53248),
}
