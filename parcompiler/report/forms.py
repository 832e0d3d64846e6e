"""The sections about closed forms: what blocks and stages cost in the sizes of the inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parcompiler.report import data
from parcompiler.report.table import Column, Table, facts, short, table, words
from parcompiler.symbolic import Costs, Forms

if TYPE_CHECKING:
    from parcompiler.report.report import Report

# What is counted, by the fields of `Forms`; a stage's messages are not those of all its blocks.
WHAT = {
    "flops_forward": "FLOPs, forward",
    "flops_backward": "FLOPs, backward",
    "bytes_forward": "bytes moved, forward",
    "bytes_backward": "bytes moved, backward",
    "sent_forward": "bytes to tensor ranks, forward",
    "sent_backward": "bytes to tensor ranks, backward",
    "saved": "bytes saved",
    "message": "bytes of outputs",
    "parameters": "bytes of parameters",
    "gradients": "bytes of gradients",
    "optimizer": "bytes of optimizer states",
}
OF_BLOCKS = frozenset({"message", "saved", "parameters", "gradients", "optimizer"})


def symbols_of(costs: Costs) -> tuple[data.Symbol, ...]:
    """The letters, and the sizes that have none."""
    sizes = (data.Symbol(size.letter, size.word, size.now) for size in costs.sizes)
    words_of = {"h": "hidden", "V": "vocabulary", "f": "inner"}
    named = (data.Symbol(letter, words_of[letter], size) for letter, size in costs.names.items())
    refused = (data.Symbol("", word, reason=reason) for word, reason in costs.refused)
    return (*sizes, *named, *refused)


def forms_of(costs: Costs) -> tuple[data.Form, ...]:
    """The forms of each template, and the work of each stage."""
    blocks = costs.blocks
    templates = (
        item for name, forms in costs.named.items() for item in _forms(name, blocks[name], forms)
    )
    stages = (
        item
        for j, forms in enumerate(costs.named_stages)
        for item in _forms(f"stage {j}", 0, forms)
        if item.what not in {WHAT[name] for name in OF_BLOCKS}
    )
    return (*templates, *stages)


def _forms(name: str, blocks: int, forms: Forms) -> Iterator[data.Form]:
    """Those that are not 0."""
    for field, what in WHAT.items():
        value = getattr(forms, field)
        if value != 0:
            yield data.Form(name, blocks, what, str(value))


def symbols(report: Report) -> Table:
    """What the letters of the closed forms stand for."""
    rows = (
        (item.letter, f"{item.word}{', from 2 on' * (item.letter == 'b')}, here {item.now:,}")
        if item.now is not None
        else (item.word, f"as captured: {item.reason}")
        for item in report.symbols
    )
    return facts("Sizes in the closed forms", rows)


def forms(report: Report) -> Table:
    """What a block, or a stage, costs for one micro-batch on a rank."""
    rows = (
        (
            item.name,
            f"× {item.blocks}" if item.blocks else "",
            item.what,
            item.value.replace("**", "^"),
        )
        for item in report.forms
    )
    headings = [words("of"), Column("blocks"), short("what"), words("for one micro-batch")]
    return table("Closed forms", headings, rows)
