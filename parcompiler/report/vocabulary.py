"""The sections about the vocabulary: what all ranks share, what stays whole, what was weighed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from parcompiler import pieces
from parcompiler.lower import Lowered
from parcompiler.plan import Plan
from parcompiler.report import data
from parcompiler.report.table import Column, Table, table, words
from parcompiler.report.units import BYTES, NOTHING, SECONDS, column, ratio
from parcompiler.timeline import VocabularyCost

if TYPE_CHECKING:
    from parcompiler.report.report import Report

_PASSES = {
    "embed": "EMBED: look up own rows",
    "embed_reduce": "their sum to the stage that uses them",
    "embed_broadcast": "gradient of the rows to all ranks",
    "embed_backward": "EMBED_BACKWARD: add it to own rows",
    "broadcast": "x to all ranks",
    "s": "S: own logits and their softmax",
    "normalize": "NORMALIZE: powers by the largest logit of all",
    "exchange": "numbers of each row between all ranks",
    "t": "T: gradients of own rows",
    "reduce": "gradient of x to its stage",
}


def vocabulary(plan: Plan, lowered: Lowered, cost: VocabularyCost | None) -> data.Vocabulary | None:
    """How the vocabulary is computed under a plan; None where nothing was decided about it."""
    choice = plan.vocabulary
    if choice is None:
        return None
    weighed = (data.Method(**dataclasses.asdict(item)) for item in choice.weighed or ())
    return data.Vocabulary(
        method=choice.method,
        tables=tuple(_tables(lowered)),
        kept=choice.kept,
        weighed=tuple(weighed),
        passes=tuple(_passes(cost)) if cost else (),
        state=cost.resident if cost else 0,
    )


def _tables(lowered: Lowered) -> Iterator[data.Table]:
    """The tables that all ranks hold rows of."""
    spread = lowered.vocabulary
    if spread is None:
        return
    embedded = {item.lookup.weight for item in spread.lookups}
    head = spread.head.head.weight if spread.head else None
    ranks = lowered.size * lowered.tensor
    for name in dict.fromkeys((*(item.lookup.weight for item in spread.lookups), head)):
        if name is not None:
            size, width = lowered.graph.by_name[name].shape
            uses = (*(["embedding"] if name in embedded else []), *(["head"] * (name == head)))
            yield data.Table(name, uses, size, width, pieces.rows(size, ranks))


def _passes(cost: VocabularyCost) -> Iterator[data.Pass]:
    """What takes time, in order."""
    for field, name in _PASSES.items():
        seconds = getattr(cost, field)
        if seconds:
            yield data.Pass(name, seconds)


def tables(report: Report) -> Table:
    """The tables that all ranks share, and the layers that stay whole, with the reason."""
    found = report.vocabulary
    rows = [] if found is None else [*_shared(found), *_kept(found)]
    headings = [words("table"), words("used as"), Column("rows"), Column("width")]
    return table("Vocabulary", [*headings, Column("rows of\na rank"), words("whole because")], rows)


def _shared(found: data.Vocabulary) -> Iterator[tuple[str, ...]]:
    """A row for each table in pieces."""
    for item in found.tables:
        counts = (f"{count:,}" for count in (item.size, item.width, item.own))
        yield item.name, " and ".join(item.uses), *counts, ""


def _kept(found: data.Vocabulary) -> Iterator[tuple[str, ...]]:
    """A row for each layer that stays whole."""
    for line in found.kept:
        name, _, reason = line.partition(": ")
        yield name, "", *[NOTHING] * 3, reason


def passes(report: Report) -> Table:
    """What every rank does for one micro-batch."""
    found = report.vocabulary.passes if report.vocabulary else ()
    times = column([item.seconds for item in found], SECONDS)
    rows = ((item.name, time) for item, time in zip(found, times, strict=True))
    headings = [words("on every rank"), Column("of a\nmicro-batch")]
    return table("Passes of the vocabulary", headings, rows)


def weighed(report: Report) -> Table:
    """The methods that were considered, and why the others lost."""
    found = report.vocabulary.weighed if report.vocabulary else ()
    fastest = min((item.seconds for item in found if item.seconds), default=0.0)
    times = column([item.seconds or 0.0 for item in found], SECONDS)
    sizes = column([item.memory or 0 for item in found], BYTES)
    rows = (
        (
            item.method,
            item.schedule or NOTHING,
            time if item.seconds is not None else NOTHING,
            ratio(item.seconds / fastest) if item.seconds and fastest else NOTHING,
            size if item.memory is not None else NOTHING,
            item.reason or "",
        )
        for item, time, size in zip(found, times, sizes, strict=True)
    )
    headings = [words("vocabulary"), words("schedule"), Column("step"), Column("of\nleast")]
    headings += [Column("fullest\nrank"), words("why not")]
    return table("Vocabulary methods considered", headings, rows)
