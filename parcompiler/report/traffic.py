"""The sections about values: between stages, among tensor ranks, of the vocabulary.

The last ones show things that deserve a second look.
"""

from __future__ import annotations

from collections.abc import Sequence

from parcompiler.plan import Shards
from parcompiler.report.data import Recomputed, ReportData, SentValue
from parcompiler.report.names import numbers, ranges
from parcompiler.report.table import Column, Table, number, scaled, short, table, words
from parcompiler.report.units import BYTES, NOTHING, SECONDS, column, quantity


def between(report: ReportData) -> Table:
    """Values sent from stage to stage."""
    values = report.values
    return table(
        "Values between stages, for a micro-batch",
        number("from", (value.source for value in values)),
        short("to", (numbers(value.targets) for value in values)),
        *_tensors(values),
        short("grad\nback", ("yes" if value.gradient else "no" for value in values)),
    )


def cuts(report: ReportData) -> Table:
    """The values that cross each cut; empty if all come from the stage before the cut."""
    far = any(max(value.targets) > value.source + 1 for value in report.values)
    crossing = [
        [value for value in report.values if value.source <= j < max(value.targets)]
        for j in range(len(report.stages) - 1)
        if far
    ]
    return table(
        "Values across each cut",
        short("cut", (f"{j} | {j + 1}" for j in range(len(crossing)))),
        scaled("size", (sum(value.nbytes for value in values) for values in crossing), BYTES),
        words("values", (", ".join(value.name for value in values) for values in crossing)),
    )


def direct(report: ReportData) -> Table:
    """Values that skip stages."""
    far = [v for v in report.values if any(j > v.source + 1 for j in v.targets)]
    return table(
        "Sent past intermediate stages",
        words("value", (v.name for v in far)),
        number("from", (v.source for v in far)),
        words("straight to", (numbers(j for j in v.targets if j > v.source + 1) for v in far)),
    )


def recomputed(report: ReportData) -> Table:
    """Values that stages compute themselves."""
    values = report.recomputed
    stages = words("by stages", (numbers(value.stages) for value in values))
    when = words("computed", ("once" if v.once else "each micro-batch" for v in values))
    return table("Computed instead of received", *_tensors(values), when, stages)


def cheaper(report: ReportData) -> Table:
    """Values that stages could compute themselves, but not as fast as receive them."""
    values = [value for value in report.values if value.cheaper]
    return table(
        "Sent, because recomputing costs more",
        words("value", (value.name for value in values)),
        number("from", (value.source for value in values)),
        words("to", (numbers(value.targets) for value in values)),
    )


def shared(report: ReportData) -> Table:
    """Tied tensors."""
    tensors = report.shared
    sums = (
        f"{'across ranks' if len(item.ranks) > 1 else 'on rank'} {numbers(item.ranks)}"
        for item in tensors
    )
    return table(
        "Shared weights",
        words("tensor", (" = ".join([item.name, *item.aliases]) for item in tensors)),
        scaled("size", (item.nbytes for item in tensors), BYTES),
        words("used by", (ranges(item.blocks) for item in tensors)),
        short("gradients added", sums),
    )


def unread(report: ReportData) -> Table:
    """Parameters that no operator reads."""
    names = [ranges(report.unread)] if report.unread else []
    return table("Unused parameters", words("", names))


def estimated(report: ReportData) -> Table:
    """Operators whose cost is not known well."""
    return table(
        "Operators whose cost is an estimate",
        words("operator", (item.operator for item in report.estimated)),
        number("blocks", (item.blocks for item in report.estimated)),
        words("of", (", ".join(item.templates) for item in report.estimated)),
    )


def placements(report: ReportData) -> Table:
    """How the tensors of each template are placed on the ranks of the tensor axis."""
    lines = [
        (item.template if number == 0 else "", line)
        for item in _sharded(report)
        for number, line in enumerate(item.tensors)
    ]
    return table(
        f"Tensors on each of {report.mesh.tensor} tensor ranks: S(d) sharded along dim d, I whole",
        words("template", (template for template, _ in lines)),
        words("tensor", (line for _, line in lines)),
    )


def collectives(report: ReportData) -> Table:
    """Collectives inside of blocks: bytes and seconds of each, and bytes in a step."""
    items, steps = report.exchanged, report.plan.microbatches
    total = (item.sent * item.blocks * (1 if item.once else steps) for item in items)
    axes = [item.axis for item in items]
    several = [words("axis", axes)] if set(axes) - {"tensor"} else []
    return table(
        "Collectives of the tensor ranks" if not several else "Collectives inside of blocks",
        words("template", (item.template for item in items)),
        number("blocks", (f"× {item.blocks}" for item in items)),
        *several,
        words("collective", (item.action for item in items)),
        words("in", ("backward" if item.backward else "forward" for item in items)),
        words("of", (item.value for item in items)),
        number("sent", column([item.sent for item in items], BYTES)),
        number("in a\nstep", (quantity(nbytes, BYTES) for nbytes in total)),
        scaled("time", (item.seconds for item in items), SECONDS),
        scaled("of that\nexposed", (item.exposed for item in items), SECONDS),
    )


def unsplit(report: ReportData) -> Table:
    """Nodes that no rule splits."""
    lines = [(item.template, line) for item in _sharded(report) for line in item.whole]
    return table(
        "Not split: computed whole on every tensor rank",
        words("template", (template for template, _ in lines)),
        words("what", (line for _, line in lines)),
    )


def vocabulary(report: ReportData) -> Table:
    """The tables that are spread over all ranks, and the layers that stay whole with the reason."""
    tables = report.vocabulary.tables if report.vocabulary else ()
    kept = report.plan.vocabulary.kept if report.plan.vocabulary else ()
    whole = [line.partition(": ") for line in kept]
    nothing, blank = [NOTHING] * len(whole), [""] * len(tables)
    return table(
        "Vocabulary",
        words("table", [*(item.name for item in tables), *(name for name, _, _ in whole)]),
        words("used as", (" and ".join(item.uses) for item in tables)),
        number("rows", [*(f"{item.size:,}" for item in tables), *nothing]),
        number("width", [*(f"{item.width:,}" for item in tables), *nothing]),
        number("rows of\na rank", [*(f"{item.own:,}" for item in tables), *nothing]),
        words("why whole", [*blank, *(reason for _, _, reason in whole)]),
    )


def vocabulary_passes(report: ReportData) -> Table:
    """The passes of the vocabulary on every rank, for one micro-batch."""
    passes = report.vocabulary.passes if report.vocabulary else ()
    return table(
        "Passes of the vocabulary",
        words("on every rank", (item.name for item in passes)),
        scaled("of a\nmicro-batch", (item.seconds for item in passes), SECONDS),
    )


def _sharded(report: ReportData) -> tuple[Shards, ...]:
    """The shardings of tensor ranks, by template."""
    return report.plan.sharding.templates if report.plan.sharding else ()


def _tensors(values: Sequence[SentValue | Recomputed]) -> tuple[Column, ...]:
    """Name, shape, dtype and size of each."""
    return (
        words("value", (value.name for value in values)),
        short("shape", ([*value.shape] for value in values)),
        short("dtype", (value.dtype for value in values)),
        scaled("size", (value.nbytes for value in values), BYTES),
    )
