"""Sizes of T5: the five of the paper, and a tiny one.

>>> PRESETS["11b"].heads * PRESETS["11b"].head_size, PRESETS["11b"].hidden
(16384, 1024)
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of one T5. `sequence` is the usual one: relative positions know no largest."""

    layers: int = 4
    """Layers of the encoder, and of the decoder where `decoder_layers` is None."""
    heads: int = 4
    hidden: int = 256
    vocabulary: int = 4096
    sequence: int = 256
    decoder_layers: int | None = None
    kv: int | None = None
    """Width of one attention head; None: hidden / heads."""
    ffn: int | None = None
    """Width of the feed-forward layer; None: 4 * hidden."""
    buckets: int = 32
    """Number of relative distances told apart."""
    max_distance: int = 128
    """The distance from which on all are the same."""
    tied: bool = True
    """The head shares its weight with the token embedding."""
    dropout: float = 0.0
    norm_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if self.kv is None and self.hidden % self.heads:
            msg = f"hidden ({self.hidden}) must be a multiple of heads ({self.heads}), or give kv"
            raise ValueError(msg)

    @property
    def num_decoder_layers(self) -> int:
        """Number of layers of the decoder."""
        return self.layers if self.decoder_layers is None else self.decoder_layers

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads if self.kv is None else self.kv

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layer."""
        return 4 * self.hidden if self.ffn is None else self.ffn


def _t5(layers: int, heads: int, hidden: int, kv: int, ffn: int) -> Config:
    return Config(
        layers, heads, hidden, vocabulary=32128, sequence=512, kv=kv, ffn=ffn, dropout=0.1
    )


# Raffel et al. 2019, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
# Transformer" (arXiv:1910.10683), section 3.7 (sizes), 3.1.1 (dropout) and 3.1.2 (sequence);
# the vocabulary is padded to 32128 as in the released checkpoints.
PRESETS: dict[str, Config] = {
    "tiny": Config(layers=2, heads=4, hidden=64, vocabulary=256, sequence=32),
    "small": _t5(6, 8, 512, 64, 2048),
    "base": _t5(12, 12, 768, 64, 3072),
    "large": _t5(24, 16, 1024, 64, 4096),
    "3b": _t5(24, 32, 1024, 128, 16384),
    "11b": _t5(24, 128, 1024, 128, 65536),
}
