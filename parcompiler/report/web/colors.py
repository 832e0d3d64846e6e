"""Colours of stages and instructions that colour-blind readers can tell apart.

They are those of Okabe and Ito, "Color Universal Design" (2008); black or white text is readable on
each:

>>> stage(0), ink(stage(0)), ink("#E69F00")
('#0072B2', '#ffffff', '#000000')
"""

from __future__ import annotations

from parcompiler.instruction import Kind

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED, YELLOW, GREY = "#56B4E9", "#D55E00", "#F0E442", "#8A8F98"
PURPLE, OLIVE = "#5D3A9B", "#8F7F00"  # our own, darker than their neighbours

STAGES = (BLUE, ORANGE, GREEN, SKY, RED, PINK, YELLOW, GREY)  # neighbours differ in lightness too
KINDS = {
    Kind.FORWARD: BLUE,
    Kind.BACKWARD: ORANGE,
    Kind.BACKWARD_INPUT: RED,
    Kind.BACKWARD_WEIGHT: PINK,
    Kind.S: GREEN,
    Kind.NORMALIZE: GREY,
    Kind.T: PURPLE,
    Kind.EMBED: YELLOW,
    Kind.EMBED_BACKWARD: OLIVE,
    Kind.UPDATE: GREY,
}


def stage(number: int) -> str:
    """The colour of a stage, or of a rank by its number; colours repeat after the last."""
    return STAGES[number % len(STAGES)]


def line(number: int) -> str:
    """The colour of a rank's line, which is thinner than a bar: avoids yellow on white."""
    return OLIVE if stage(number) == YELLOW else stage(number)


def paler(color: str, white: float) -> str:
    """A colour mixed with a fraction of `white`, from 0 to 1.

    >>> paler("#0072B2", 0.5)
    '#80b8d8'
    """
    parts = (int(color[k : k + 2], 16) for k in (1, 3, 5))
    return "#" + "".join(f"{round(part + white * (255 - part)):02x}" for part in parts)


def ink(color: str) -> str:
    """Black or white, whichever has the higher contrast (WCAG 2.2) to a colour."""
    return "#000000" if (luminance(color) + 0.05) ** 2 > 1.05 * 0.05 else "#ffffff"


def luminance(color: str) -> float:
    """The relative luminance of a colour `#rrggbb` (WCAG 2.2)."""
    parts = (int(color[k : k + 2], 16) / 255 for k in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
