"""The model as a row of blocks and the mesh as a grid of ranks: what the template draws of them.

Ranks of the mesh are numbered with tensor fastest, then data, then pipeline; those of a report
are its pipeline coordinates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parcompiler.report.names import clean, ranges
from parcompiler.report.units import BYTES, COUNT, SECONDS, percent, quantity
from parcompiler.report.web import colors

if TYPE_CHECKING:
    from parcompiler.report.report import Report

CELLS = 8  # more ranks in a row of the mesh than these are named by their first and last


@dataclass(frozen=True, slots=True)
class Chip:
    """A coloured piece with text on it."""

    text: str
    color: str
    ink: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """A stage in the row: its head, a chip for each block, and what is said below."""

    head: Chip
    blocks: tuple[Chip, ...]
    names: str
    figures: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A pipeline coordinate: the stages that it holds, its ranks, how full and idle they are."""

    number: int
    stages: tuple[Chip, ...]
    ranks: tuple[str, ...]
    memory: str
    fraction: float
    share: str
    idle: str
    device: str = ""  # where lines have different ones


def parts(report: Report) -> Iterator[Part]:
    """The stages in order."""
    for j, stage in enumerate(report.stages):
        color = colors.stage(j)
        ink = colors.ink(color)
        yield Part(
            head=Chip(f"stage {j}", color, ink, f"rank {stage.rank}"),
            blocks=tuple(Chip("", color, ink, clean(name)) for name in stage.blocks),
            names=clean(ranges(stage.blocks)),
            figures=(
                f"{quantity(stage.parameters, COUNT)} parameters",
                f"{quantity(stage.forward + stage.backward, SECONDS)} a micro-batch",
            ),
        )


def spread(report: Report) -> tuple[str, ...]:
    """The tables of the vocabulary that every rank holds rows of, and what for."""
    tables = report.vocabulary.tables if report.vocabulary else ()
    return tuple(clean(f"{item.name} ({' and '.join(item.uses)})") for item in tables)


def rows(report: Report) -> Iterator[Row]:
    """The pipeline coordinates from the first to the last."""
    copies, devices = report.mesh.data * report.mesh.tensor, report.mesh.devices
    for number, rank in enumerate(report.ranks):
        held = (j for j, stage in enumerate(report.stages) if stage.rank == number)
        fraction = rank.peak_memory / report.mesh.limit(number)
        yield Row(
            number=number,
            stages=tuple(
                Chip(str(j), colors.stage(j), colors.ink(colors.stage(j)), f"stage {j}")
                for j in held
            ),
            ranks=_names(range(number * copies, (number + 1) * copies)),
            memory=quantity(rank.peak_memory, BYTES),
            fraction=min(1.0, fraction),
            share=percent(fraction),
            idle=percent(rank.idle),
            device=devices[number].name if devices else "",
        )


def _names(ranks: Sequence[int]) -> tuple[str, ...]:
    """The numbers of ranks; of many the first and the last."""
    if len(ranks) <= CELLS:
        return tuple(map(str, ranks))
    return (f"{ranks[0]} … {ranks[-1]}",)
