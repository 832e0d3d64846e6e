"""Special strategies that need no collective, as a simulated rank computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from parcompiler.pieces import Span, piece
from parcompiler.spmd.call import NodeCall, Shape
from parcompiler.spmd.elementwise import REDUCTION_SUM
from parcompiler.spmd.simulate import Values
from parcompiler.spmd.strategy import Strategy, localized


class RankCall(NamedTuple):
    """A call on one of `n` ranks: `arguments` are local, `shapes` those of the whole operands."""

    target: Callable[..., Any]
    arguments: Mapping[str, Any]
    shapes: Sequence[Shape]
    n: int
    rank: int


def run_special(call: NodeCall, values: Values, strategy: Strategy, place: tuple[int, int]) -> Any:
    """What one rank (`n`, `rank`) computes by a special strategy."""
    n, rank = place
    sizes = strategy.sizes
    local = localized(call.filled(values), sizes, lambda whole: piece(whole, n, rank).size)
    assert callable(call.node.target), f"{call.name} is no function"
    return SPECIAL[strategy.special](RankCall(call.node.target, local, call.shapes, n, rank))


def part(call: RankCall, operand: int, dim: int) -> Span:
    """The rank's piece of a dimension of an operand."""
    return piece(call.shapes[operand][dim], call.n, call.rank)


def table_rows(call: RankCall) -> tuple[Span, torch.Tensor, torch.Tensor]:
    """The rank's rows of a table, where indices stand in them, and which are inside."""
    span = part(call, 0, 0)
    position = call.arguments["indices"] - span.start
    inside = (position >= 0) & (position < span.size)
    return span, position.where(inside, 0), inside


def embedding(call: RankCall) -> torch.Tensor:
    """The rows that this rank has; zero for the others."""
    span, position, inside = table_rows(call)
    padding = call.arguments["padding_idx"] - span.start
    padding = padding if 0 <= padding < span.size else -1
    rows: torch.Tensor = call.target(call.arguments["weight"], position, padding)
    return rows.masked_fill(~inside.unsqueeze(-1), 0)


def bags(call: RankCall) -> Any:
    """The sums of the rows that this rank has."""
    _, position, inside = table_rows(call)
    weights = inside.to(call.arguments["weight"].dtype)
    return call.target(**{**call.arguments, "indices": position, "per_sample_weights": weights})


def loss_of_rows(call: RankCall) -> torch.Tensor:
    """The sum over this rank's rows, divided by what the rows of all ranks weigh."""
    span, classes, weight = part(call, 0, 0), call.arguments["target"], call.arguments["weight"]
    counts = classes != call.arguments["ignore_index"]
    each = counts if weight is None else weight[classes.where(counts, 0)].masked_fill(~counts, 0)
    rows = classes[span.start : span.start + span.size]
    total: torch.Tensor = call.target(
        **{**call.arguments, "target": rows, "reduction": REDUCTION_SUM}
    )
    mean: torch.Tensor = total / each.sum()
    return mean


def heads(call: RankCall) -> Any:
    """Attention of this rank's heads, each with the keys and values that it shares."""
    span, keys = part(call, 0, -3), call.arguments["key"]
    group = call.shapes[0][-3] // call.shapes[1][-3]
    partner = torch.arange(span.start, span.start + span.size, device=keys.device) // group
    local = {name: call.arguments[name].index_select(-3, partner) for name in ("key", "value")}
    return call.target(**{**call.arguments, **local, "enable_gqa": False})


def experts(call: RankCall) -> torch.Tensor:
    """The rows of this rank's experts; zero for the others."""
    rows, weight, ends = list(call.arguments.values())[:3]
    span = part(call, 1, 0)
    first = int(ends[span.start - 1]) if span.start else 0
    last = int(ends[span.start + span.size - 1])
    product = call.target(
        rows[first:last], weight, ends[span.start : span.start + span.size] - first
    )
    return F.pad(product, (0, 0, first, rows.shape[0] - last))


SPECIAL: Mapping[str, Callable[[RankCall], Any]] = {
    "vocabulary lookup": embedding,
    "vocabulary bags": bags,
    "own rows": loss_of_rows,
    "own heads": heads,
    "own experts": experts,
}
