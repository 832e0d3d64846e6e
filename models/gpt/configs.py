"""Sizes of GPT: the table of the GPT-3 paper, and a tiny one.

>>> PRESETS["175b"].head_size, PRESETS["175b"].ffn_size
(128, 49152)
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of one GPT. `sequence` is the largest one: positions are learned."""

    layers: int = 4
    heads: int = 4
    hidden: int = 256
    vocabulary: int = 4096
    sequence: int = 256
    ffn: int | None = None
    """Width of the feed-forward layer; None: 4 * hidden."""
    tied: bool = True
    """The head shares its weight with the token embedding."""
    dropout: float = 0.0

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


def _gpt3(layers: int, heads: int, hidden: int) -> Config:
    return Config(layers=layers, heads=heads, hidden=hidden, vocabulary=50257, sequence=2048)


# Brown et al. 2020, "Language Models are Few-Shot Learners" (arXiv:2005.14165), table 2.1, with its
# two misprints mended: 1.3b has 24 heads of 128 there, which is not 2048, and 13b is 5140 wide,
# which 40 heads of 128 are not. Dropout is 0 because the paper names none.
PRESETS: dict[str, Config] = {
    "tiny": Config(layers=2, heads=4, hidden=64, vocabulary=256, sequence=32),
    "125m": _gpt3(12, 12, 768),
    "350m": _gpt3(24, 16, 1024),
    "760m": _gpt3(24, 16, 1536),
    "1.3b": _gpt3(24, 16, 2048),
    "2.7b": _gpt3(32, 32, 2560),
    "6.7b": _gpt3(32, 32, 4096),
    "13b": _gpt3(40, 40, 5120),
    "175b": _gpt3(96, 96, 12288),
}
