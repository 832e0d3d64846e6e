"""Numbers with a readable unit and three digits.

>>> quantity(1.3e9, BYTES), quantity(0.0034, SECONDS), quantity(12.49e12, FLOPS) + "FLOP"
('1.21 GiB', '3.40 ms', '12.5 TFLOP')

In a column they share a unit, so that they can be compared, unless they differ too much.

>>> column([950e-6, 1.1e-3], SECONDS), column([4, 2**30, 0], BYTES)
(['0.95 ms', '1.10 ms'], ['4 B', '1 GiB', '-'])
"""

from __future__ import annotations

from collections.abc import Sequence

Scale = tuple[tuple[float, str], ...]

BYTES: Scale = tuple((1024.0**k, f"{unit}B") for k, unit in enumerate(["", "Ki", "Mi", "Gi", "Ti"]))
SECONDS: Scale = ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
COUNT: Scale = ((1.0, ""), (1e3, "k"), (1e6, "M"), (1e9, "B"), (1e12, "T"))
FLOPS: Scale = tuple((1000.0**k, unit) for k, unit in enumerate(["", *"kMGTPE"]))

NOTHING = "-"
APART = 100.0  # numbers that differ by a larger factor do not share a unit


def quantity(value: float, scale: Scale) -> str:
    """One number; `NOTHING` for 0."""
    return _together([value], scale)[0]


def column(values: Sequence[float], scale: Scale) -> list[str]:
    """The numbers of a column."""
    sizes = [abs(value) for value in values if value]
    if sizes and max(sizes) > APART * min(sizes):
        return [quantity(value, scale) for value in values]
    return _together(values, scale)


def unit(largest: float, scale: Scale) -> tuple[float, str]:
    """The natural unit for figures up to `largest`, and its symbol.

    >>> unit(0.0034, ((1e-3, "ms"), (1.0, "s")))
    (0.001, 'ms')
    """
    return next((pair for pair in reversed(scale) if largest >= pair[0]), scale[0])


def percent(fraction: float) -> str:
    """
    >>> percent(0.1234), percent(0.0002), percent(0.0)
    ('12.3 %', '<0.1 %', '0.0 %')
    """
    return "<0.1 %" if 0 < fraction < 0.001 else f"{100 * fraction:.1f} %"


def ratio(value: float) -> str:
    """
    >>> ratio(1.2345)
    '1.23×'
    """
    return f"{value:.{_decimals(value)}f}×"


def rate(value: float) -> str:
    """A number per second, with three significant digits.

    >>> rate(1234567.8), rate(0.01234)
    ('1,230,000', '0.0123')
    """
    number = float(f"{value:.3g}")
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _together(values: Sequence[float], scale: Scale) -> list[str]:
    """The numbers in one unit with equally many decimals."""
    largest = max((abs(value) for value in values), default=0.0)
    size, sign = unit(largest / 0.9995, scale)  # a number that rounds up to the next unit uses it
    exact = scale[0][0] == 1 and all(value % size == 0 for value in values)  # counts, not times
    decimals = 0 if exact else _decimals(largest / size)
    return [
        f"{value / size:.{decimals}f} {sign}".rstrip() if value else NOTHING for value in values
    ]


def _decimals(largest: float) -> int:
    """The number of decimals for three digits in all."""
    return next((d for d in (2, 1) if len(f"{largest:.{d}f}") <= 4), 0)
