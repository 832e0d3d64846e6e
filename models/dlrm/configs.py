"""Sizes of DLRM: those of the paper and of MLPerf, and a tiny one.

>>> len(PRESETS["criteo"].tables), sum(PRESETS["criteo"].tables)
(26, 33762577)
>>> PRESETS["criteo"].pairs
351
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of one DLRM: a table of `tables[i]` rows for each feature that is a category."""

    tables: tuple[int, ...] = (10000, 1000, 100, 10)
    hidden: int = 16
    """Width of a row of a table, and of what becomes of the numbers."""
    numbers: int = 13
    """Features that are numbers."""
    bottom: tuple[int, ...] = (64, 32)
    """Widths of the layers on the numbers; one to `hidden` follows."""
    top: tuple[int, ...] = (64, 32)
    """Widths of the layers on the products; one to the answer follows."""
    sparse: bool = False
    """Whether gradients of tables are the rows that a step looks up."""

    def __post_init__(self) -> None:
        sizes = (self.hidden, self.numbers, *self.tables, *self.bottom, *self.top)
        if min(sizes) < 1:
            msg = f"every size must be at least 1 (got {min(sizes)})"
            raise ValueError(msg)
        if not self.tables:
            msg = "tables (0) must be at least 1"
            raise ValueError(msg)

    @property
    def features(self) -> int:
        """The vectors that are multiplied: a row of each table, and one of the numbers."""
        return len(self.tables) + 1

    @property
    def pairs(self) -> int:
        """Pairs of different features."""
        return self.features * (self.features - 1) // 2


PRESETS: dict[str, Config] = {
    "tiny": Config(tables=(96, 40, 7), hidden=8, numbers=5, bottom=(16,), top=(16, 8)),
    # Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation
    # Systems" (arXiv:1906.00091), section 5.1: the data of Criteo's Kaggle challenge.
    "criteo": Config(
        tables=(
            *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
            *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
        ),
        hidden=16,
        bottom=(512, 256, 64),
        top=(512, 256),
        sparse=True,
    ),
    # The reference of MLPerf Training 0.7 to 2.1: Criteo's Terabyte data, indices below 40 million.
    "mlperf": Config(
        tables=(
            *(39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346),
            *(10, 2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108),
            36,
        ),
        hidden=128,
        bottom=(512, 256),
        top=(1024, 1024, 512, 256),
        sparse=True,
    ),
}
