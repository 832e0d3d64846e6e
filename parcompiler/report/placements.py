"""What the tensor ranks hold and tell each other, from the plan and the graph of one rank."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import TYPE_CHECKING

from torch import fx

from parcompiler.graph import shape_of
from parcompiler.plan import Plan
from parcompiler.problem import Priced
from parcompiler.report import data
from parcompiler.report.table import Column, Table, table, words
from parcompiler.report.units import BYTES, column, quantity
from parcompiler.spmd.runtime_call import NodeCollectives, RuntimeCall

if TYPE_CHECKING:
    from parcompiler.lower import Lowered
    from parcompiler.report.report import Report

FAN_OUT = RuntimeCall("fan_out", shares=True)


def sharded(plan: Plan) -> tuple[data.Sharded, ...]:
    """How each template's tensors are held, and what in it is not split."""
    if plan.sharding is None:
        return ()
    return tuple(
        data.Sharded(shards.template, shards.blocks, shards.tensors, shards.whole)
        for shards in plan.sharding.templates
    )


def exchanged(priced: Priced, lowered: Lowered) -> tuple[data.Exchanged, ...]:
    """The collectives of each template, in order; `priced` are the blocks of one tensor rank."""
    trained = set() if lowered.asynchronous else {item.node for item in lowered.graph.parameters}
    blocks = priced.cut.blocks
    counts: dict[str, int] = {}
    for block in blocks:
        counts[block.template] = counts.get(block.template, 0) + 1
    first = {block.template: block for block in reversed(blocks)}
    return tuple(
        data.Exchanged(template, counts[template], *row)
        for template in counts
        for node in first[template].nodes
        for row in _rows(node, trained)
    )


def _rows(
    node: fx.Node, trained: Container[str]
) -> Iterator[tuple[str, str, tuple[int, ...], int, bool, bool]]:
    """The collectives in a node: what, of which value, its shape, bytes sent, whether backward, and
    whether once a step: the gradients of the parameters `trained`, which micro-batches add to."""
    said = node.meta.get("exchange")
    if not isinstance(said, NodeCollectives):
        return
    value = node.all_input_nodes[0]
    once = node.target == FAN_OUT and value.name in trained
    for backward, actions in ((False, said.forward), (True, said.backward)):
        for action, nbytes in actions:
            sent = round(said.sent_by(action, nbytes))
            yield action, value.name, shape_of(value), sent, backward, once


def held(report: Report) -> Table:
    """How the tensors of each template are held by the ranks of the tensor axis."""
    rows = (
        (item.template if number == 0 else "", line)
        for item in report.sharded
        for number, line in enumerate(item.tensors)
    )
    title = f"Held by each of {report.mesh.tensor} tensor ranks: S(d) a piece along d, I the whole"
    return table(title, [words("template"), words("tensor")], rows)


def told(report: Report) -> Table:
    """What the tensor ranks exchange, each time and in a step."""
    items = report.exchanged
    steps = report.choices.microbatches
    rows = zip(
        (item.template for item in items),
        (f"× {item.blocks}" for item in items),
        (item.action for item in items),
        ("backward" if item.backward else "forward" for item in items),
        (item.value for item in items),
        column([item.sent for item in items], BYTES),
        (quantity(item.sent * item.blocks * (1 if item.once else steps), BYTES) for item in items),
        strict=True,
    )
    headings = [words("template"), Column("blocks"), words("collective"), words("in"), words("of")]
    return table(
        "Exchanged by tensor ranks", [*headings, Column("sent"), Column("in a\nstep")], rows
    )


def unsplit(report: Report) -> Table:
    """What no rule splits: computed whole on every tensor rank."""
    rows = ((item.template, line) for item in report.sharded for line in item.whole)
    return table("Computed whole on every tensor rank", [words("template"), words("what")], rows)
