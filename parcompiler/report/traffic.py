"""The sections about what stages have to do with each other, and what deserves a second look."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from parcompiler.report import data
from parcompiler.report.names import numbers, ranges
from parcompiler.report.table import Column, Table, short, table, words
from parcompiler.report.units import BYTES, column

if TYPE_CHECKING:
    from parcompiler.report.report import Report


def between(report: Report) -> Table:
    """What goes from stage to stage."""
    rows = (
        (str(value.source), numbers(value.targets), *tensor, "yes" if value.gradient else "no")
        for value, tensor in zip(report.values, _tensors(report.values), strict=True)
    )
    return table(
        "Values between stages, for a micro-batch",
        [Column("from"), short("to"), *_TENSOR, short("grad\nback")],
        rows,
    )


def cuts(report: Report) -> Table:
    """What crosses each cut, where that is not what begins there."""
    crossing = [
        [v for v in report.values if v.source <= j < max(v.targets)]
        for j in range(len(report.stages) - 1)
    ]
    sizes = column([sum(value.nbytes for value in values) for values in crossing], BYTES)
    rows = (
        (f"{j} | {j + 1}", size, ", ".join(value.name for value in values))
        for j, (size, values) in enumerate(zip(sizes, crossing, strict=True))
    )
    far = any(max(value.targets) > value.source + 1 for value in report.values)
    headings = [short("cut"), Column("size"), words("values")]
    return table("Values across each cut", headings, rows if far else ())


def direct(report: Report) -> Table:
    """What does not stop at the stages between."""
    rows = (
        (value.name, str(value.source), numbers(far))
        for value in report.values
        if (far := [j for j in value.targets if j > value.source + 1])
    )
    headings = [words("value"), Column("from"), words("straight to")]
    return table("Sent directly, past the stages between", headings, rows)


def recomputed(report: Report) -> Table:
    """What stages compute for themselves."""
    rows = (
        (*tensor, numbers(value.stages))
        for value, tensor in zip(report.recomputed, _tensors(report.recomputed), strict=True)
    )
    return table("Recomputed instead of received", [*_TENSOR, words("by stages")], rows)


def cheaper(report: Report) -> Table:
    """What stages could compute for themselves, but not as fast as it comes."""
    rows = ((v.name, str(v.source), numbers(v.targets)) for v in report.values if v.cheaper)
    headings = [words("value"), Column("from"), words("to")]
    return table("Sent, because that is cheaper than to recompute", headings, rows)


def shared(report: Report) -> Table:
    """Tied tensors."""
    sizes = column([item.nbytes for item in report.shared], BYTES)
    rows = (
        (_names(item), size, ranges(item.blocks), _added(item))
        for item, size in zip(report.shared, sizes, strict=True)
    )
    headings = [words("tensor"), Column("size"), words("used by"), short("gradients added")]
    return table("Shared weights", headings, rows)


def _names(item: data.Shared) -> str:
    """The name of a tied tensor and its other names."""
    return " = ".join([item.name, *item.aliases])


def _added(item: data.Shared) -> str:
    """Where the gradients of a tied tensor are added."""
    return f"{'across ranks' if len(item.ranks) > 1 else 'on rank'} {numbers(item.ranks)}"


def unread(report: Report) -> Table:
    """Parameters without an effect."""
    rows = [(ranges(report.unread),)] if report.unread else []
    return table("Parameters that nothing reads", [words("")], rows)


def estimated(report: Report) -> Table:
    """Operators whose cost is not known well."""
    rows = (
        (item.operator, str(item.blocks), ", ".join(item.templates)) for item in report.estimated
    )
    headings = [words("operator"), Column("blocks"), words("of")]
    return table("Operators whose cost is an estimate", headings, rows)


_TENSOR = (words("value"), short("shape"), short("dtype"), Column("size"))


def _tensors(
    values: Sequence[data.Value | data.Recomputed],
) -> Iterator[tuple[str, str, str, str]]:
    """Name, shape, dtype and size of each."""
    sizes = column([value.nbytes for value in values], BYTES)
    for value, size in zip(values, sizes, strict=True):
        yield value.name, str([*value.shape]), value.dtype, size
