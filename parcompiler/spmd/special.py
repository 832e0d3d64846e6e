"""Strategies that no line says: the call on a rank is another computation than the operator's.

| name              | operator            | what ranks split                                       |
|-------------------|---------------------|--------------------------------------------------------|
| vocabulary lookup | embedding           | rows of the table: those of other ranks count as zero  |
| vocabulary bags   | embedding_bag (sum) | rows of the table, likewise                            |
| own rows          | cross_entropy_loss  | rows, when the loss is a mean over those that count    |
| own heads         | attention           | heads that share fewer keys and values than ranks      |
| own experts       | grouped products    | experts: the rows of other ranks' experts are zero     |
| classes           | cross_entropy_loss  | classes; ranks exchange the maximum and sum of each row|

`LOCAL` has the computations that need no exchange, as functions of the local arguments, the shapes
of the whole operands, n and the rank; those that need one are in `TALKING`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from parcompiler.pieces import piece
from parcompiler.spmd.call import Call, Shape, is_random
from parcompiler.spmd.losses import REDUCTION_MEAN, REDUCTION_SUM
from parcompiler.spmd.placement import I, P, Placement, R, S
from parcompiler.spmd.strategy import Draws, Strategy

Local = Callable[[Callable[..., Any], Mapping[str, Any], Sequence[Shape], int, int], Any]
TALKING = frozenset({"classes"})


def special(call: Call, n: int, *, uneven: bool) -> Iterator[Strategy]:
    """The special strategies of a call."""
    make = _MAKERS.get(call.base)
    if make is not None:
        yield from make(call, n, uneven)


def _parts_evenly(size: int, n: int, uneven: bool) -> bool:
    return size % n == 0 or (uneven and size > n)


def _tables(call: Call, n: int, uneven: bool) -> Iterator[Strategy]:
    """The vocabulary of an embedding."""
    plain = not (call.arguments.get("scale_grad_by_freq") or call.arguments.get("sparse"))
    if plain and call.arguments.get("max_norm") is None:
        if _parts_evenly(call.shapes[0][0], n, uneven):
            yield Strategy((S(0), R), (P,), special="vocabulary lookup")


def _bags(call: Call, n: int, uneven: bool) -> Iterator[Strategy]:
    """The vocabulary of a bag of embeddings that are added up."""
    plain = not (call.arguments.get("scale_grad_by_freq") or call.arguments.get("sparse"))
    sums = call.arguments.get("mode", 0) == 0 and len(call.operands) == 3
    padded = call.arguments.get("padding_idx") is not None
    if plain and sums and not padded and _parts_evenly(call.shapes[0][0], n, uneven):
        rest = (R,) * (len(call.results) - 1)
        yield Strategy((S(0), R, R), (P, *rest), special="vocabulary bags")


def _rows(call: Call, n: int, uneven: bool) -> Iterator[Strategy]:
    """Rows, and classes, of a cross entropy of class indices."""
    logits, target = call.shapes[:2]
    reduction = call.arguments.get("reduction")
    if len(logits) != 2 or len(target) != 1:
        return
    others = (R,) * (len(call.operands) - 1)
    if reduction == REDUCTION_MEAN and _parts_evenly(logits[0], n, uneven):
        yield Strategy((S(0), *others), (P,), special="own rows")
    weighted = len(call.operands) > 2
    reduces = reduction in (REDUCTION_MEAN, REDUCTION_SUM)
    if reduces and not weighted and _parts_evenly(logits[1], n, uneven):
        result = I if any(call.carries) else R
        yield Strategy((S(1), *others), (result,), special="classes")


def _heads(call: Call, n: int, uneven: bool) -> Iterator[Strategy]:
    """Heads of queries, where the heads of keys and values cannot be split with them."""
    query, key = call.shapes[:2]
    if not call.arguments.get("enable_gqa") or len(query) < 3:
        return
    if query[-3] % n or key[-3] == 1 or key[-3] % n == 0:
        return
    heads = len(query) - 3
    inputs: list[Placement] = [S(heads), R, R]
    for mask in call.shapes[3:]:
        place = len(mask) - 3
        inputs.append(S(place) if place >= 0 and mask[place] > 1 else R)
    draws: Draws = "own" if is_random(call) else ""
    yield Strategy(tuple(inputs), (S(heads),), special="own heads", draws=draws)


def _experts(call: Call, n: int, uneven: bool) -> Iterator[Strategy]:
    """Experts that are stacked in one matrix product."""
    if [len(shape) for shape in call.shapes] == [2, 3, 1]:
        if _parts_evenly(call.shapes[1][0], n, uneven):
            yield Strategy((R, S(0), R), (P,), special="own experts")


_MAKERS: Mapping[str, Callable[[Call, int, bool], Iterator[Strategy]]] = {
    "embedding": _tables,
    "embedding_bag": _bags,
    "cross_entropy_loss": _rows,
    "scaled_dot_product_attention": _heads,
    "grouped_mm_fallback": _experts,
    "_grouped_mm": _experts,
}


def vocabulary_lookup(
    target: Callable[..., Any],
    arguments: Mapping[str, Any],
    shapes: Sequence[Shape],
    n: int,
    rank: int,
) -> torch.Tensor:
    """The rows that this rank has; zero for the others."""
    own = piece(shapes[0][0], n, rank)
    position, inside = _inside(arguments["indices"], own.start, own.size)
    padding = arguments["padding_idx"] - own.start
    padding = padding if 0 <= padding < own.size else -1
    rows: torch.Tensor = target(arguments["weight"], position, padding)
    return rows.masked_fill(~inside.unsqueeze(-1), 0)


def vocabulary_bags(
    target: Callable[..., Any],
    arguments: Mapping[str, Any],
    shapes: Sequence[Shape],
    n: int,
    rank: int,
) -> Any:
    """The sums of the rows that this rank has."""
    own, weight = piece(shapes[0][0], n, rank), arguments["weight"]
    position, inside = _inside(arguments["indices"], own.start, own.size)
    local = {**arguments, "indices": position, "per_sample_weights": inside.to(weight.dtype)}
    return target(**local)


def own_rows(
    target: Callable[..., Any],
    arguments: Mapping[str, Any],
    shapes: Sequence[Shape],
    n: int,
    rank: int,
) -> torch.Tensor:
    """The sum over this rank's rows, divided by what the rows of all ranks weigh."""
    own, classes, weight = piece(shapes[0][0], n, rank), arguments["target"], arguments["weight"]
    counts = classes != arguments["ignore_index"]
    each = counts if weight is None else weight[classes.where(counts, 0)].masked_fill(~counts, 0)
    rows = classes[own.start : own.start + own.size]
    total: torch.Tensor = target(**{**arguments, "target": rows, "reduction": REDUCTION_SUM})
    mean: torch.Tensor = total / each.sum()
    return mean


def own_heads(
    target: Callable[..., Any],
    arguments: Mapping[str, Any],
    shapes: Sequence[Shape],
    n: int,
    rank: int,
) -> Any:
    """Attention of this rank's heads, each with the keys and values that it shares."""
    heads, shared = shapes[0][-3], shapes[1][-3]
    own = piece(heads, n, rank)
    partner = torch.arange(own.start, own.start + own.size, device=arguments["key"].device)
    partner = partner // (heads // shared)
    local = {name: arguments[name].index_select(-3, partner) for name in ("key", "value")}
    return target(**{**arguments, **local, "enable_gqa": False})


def own_experts(
    target: Callable[..., Any],
    arguments: Mapping[str, Any],
    shapes: Sequence[Shape],
    n: int,
    rank: int,
) -> torch.Tensor:
    """The rows of this rank's experts; zero for the others."""
    rows, weight, ends = list(arguments.values())[:3]
    own = piece(shapes[1][0], n, rank)
    first = int(ends[own.start - 1]) if own.start else 0
    last = int(ends[own.start + own.size - 1])
    local = ends[own.start : own.start + own.size] - first
    product = target(rows[first:last], weight, local)
    return F.pad(product, (0, 0, first, rows.shape[0] - last))


def _inside(indices: torch.Tensor, start: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where indices stand in a piece (0 for those outside), and which are inside."""
    position = indices - start
    inside = (position >= 0) & (position < size)
    return position.where(inside, 0), inside


LOCAL: Mapping[str, Local] = {
    "vocabulary lookup": vocabulary_lookup,
    "vocabulary bags": vocabulary_bags,
    "own rows": own_rows,
    "own heads": own_heads,
    "own experts": own_experts,
}
