"""Strategies that no formula can express: the call on a rank is not the operator itself.

| name              | operator            | what ranks split                                       |
|-------------------|---------------------|--------------------------------------------------------|
| vocabulary lookup | embedding           | rows of the table: those of other ranks count as zero  |
| vocabulary bags   | embedding_bag (sum) | rows of the table, likewise                            |
| own rows          | cross_entropy_loss  | rows, when the loss is a mean over those that count    |
| own heads         | attention           | heads that share fewer keys and values than ranks      |
| causal rows       | attention           | rows of queries under a causal mask (context axis)     |
| ring              | attention           | all rows; keys and values go round (context axis)      |
| own experts       | grouped products    | experts: the rows of other ranks' experts are zero     |
| classes           | cross_entropy_loss  | classes; ranks exchange the maximum and sum of each row|
| classes of rows   | the same of own rows| likewise, where context ranks have rows                |

For each there is a function that yields its strategies, and one that makes the runtime call on a
rank. All but the ring and the last two need no collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from parcompiler.capture.effects import is_random
from parcompiler.ring import RingAttention
from parcompiler.spmd.call import NodeCall
from parcompiler.spmd.elementwise import REDUCTION_MEAN, REDUCTION_SUM, REDUCTIONS
from parcompiler.spmd.placement import I, P, Placement, R, S
from parcompiler.spmd.rows import Rows
from parcompiler.spmd.runtime_call import Actions, NodeCollectives, RuntimeCall
from parcompiler.spmd.segments import Segments
from parcompiler.spmd.strategy import Draws, Strategy


@dataclass(frozen=True, slots=True)
class SpecialCall:
    """The call of the runtime that computes a special strategy on a rank."""

    target: RuntimeCall
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    collectives: NodeCollectives | None = None


def special_strategies(
    call: NodeCall,
    n: int,
    *,
    segments: Sequence[Segments] = (),
    rows: Rows | None = None,
) -> Iterator[Strategy]:
    """The special strategies of a call; `segments` are those of its rows, and `rows` are given on
    the context axis."""
    if call.base in _STRATEGIES:
        yield from _STRATEGIES[call.base](call, n)
    if rows is not None and call.base == "scaled_dot_product_attention":
        yield from _row_strategies(call, n)
        yield from _ring_strategies(call, n)
    if rows is not None and call.base == "cross_entropy_loss":
        for strategy in _loss_strategies(call, n):
            for division in segments if strategy.special == "own rows" else ():
                if sum(division) == call.shapes[0][0] and not any(part % n for part in division):
                    inputs = S(0, division), *strategy.inputs[1:]
                    yield replace(strategy, inputs=inputs)


def special_call(
    strategy: Strategy, call: NodeCall, local: Mapping[str, Any], n: int
) -> SpecialCall:
    """The call for a strategy; `local` are the operator's arguments by name, on a rank."""
    made, rows = _CALLS[strategy.special](call, local, n), strategy.inputs[0]
    more: dict[str, Any] = {"zigzag": True} if rows.zigzag else {}
    if rows.segments and strategy.special == "own rows":
        more["sizes"] = rows.segments
    return replace(made, kwargs={**made.kwargs, **more})


def _divides(size: int, n: int) -> bool:
    return size % n == 0 or size > n


# Embeddings


def _embedding_strategies(call: NodeCall, n: int) -> Iterator[Strategy]:
    plain = not call.arguments.get("scale_grad_by_freq")
    if plain and call.arguments.get("max_norm") is None:
        if _divides(call.shapes[0][0], n):
            yield Strategy((S(0), R), (P,), special="vocabulary lookup")


def _embedding(call: NodeCall, local: Mapping[str, Any], n: int) -> SpecialCall:
    padding = local["padding_idx"]
    return SpecialCall(
        RuntimeCall("embedding", likeness=_like_embedding),
        (local["indices"], local["weight"], call.shapes[0][0]),
        ({"padding_idx": padding} if padding >= 0 else {}) | _asked_for_rows(local),
    )


def _asked_for_rows(local: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword for row gradients of a table."""
    return {"sparse": True} if local.get("sparse") else {}


def _like_embedding(
    indices: torch.Tensor,
    weight: torch.Tensor,
    size: int,
    padding_idx: int = -1,
    *,
    sparse: bool = False,
) -> torch.Tensor:
    rows = torch.embedding(weight, indices, padding_idx, False, sparse)
    return rows.masked_fill((indices < size).unsqueeze(-1), 0)


def _bag_strategies(call: NodeCall, n: int) -> Iterator[Strategy]:
    plain = not call.arguments.get("scale_grad_by_freq")
    sums = call.arguments.get("mode", 0) == 0 and len(call.operands) == 3
    padded = call.arguments.get("padding_idx") is not None
    if plain and sums and not padded and _divides(call.shapes[0][0], n):
        rest = (R,) * (len(call.results) - 1)
        yield Strategy((S(0), R, R), (P, *rest), special="vocabulary bags")


def _bags(call: NodeCall, local: Mapping[str, Any], n: int) -> SpecialCall:
    kwargs = {"include_last_offset": True} if local["include_last_offset"] else {}
    kwargs |= _asked_for_rows(local)
    weights = local["per_sample_weights"]
    return SpecialCall(
        RuntimeCall("embedding_bag"),
        (local["indices"], local["weight"], local["offsets"], call.shapes[0][0]),
        kwargs if weights is None else {**kwargs, "per_sample_weights": weights},
    )


# Cross entropy of class indices


def _loss_strategies(call: NodeCall, n: int) -> Iterator[Strategy]:
    logits, target = call.shapes[:2]
    reduction = call.arguments.get("reduction")
    if len(logits) != 2 or len(target) != 1:
        return
    others = (R,) * (len(call.operands) - 1)
    if reduction == REDUCTION_MEAN and _divides(logits[0], n):
        yield Strategy((S(0), *others), (P,), special="own rows")
    weighted = len(call.operands) > 2
    reduces = reduction in (REDUCTION_MEAN, REDUCTION_SUM)
    if reduces and not weighted and _divides(logits[1], n):
        result = I if any(call.carries) else R
        yield Strategy((S(1), *others), (result,), special="classes")


def _loss_of_rows(call: NodeCall, local: Mapping[str, Any], n: int) -> SpecialCall:
    kwargs = _changed(local, weight=None, ignore_index=-100, label_smoothing=0.0)
    target = RuntimeCall("cross_entropy_of_rows", likeness=_like_loss_of_rows)
    return SpecialCall(target, (local["self"], local["target"]), kwargs)


def _like_loss_of_rows(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    sizes: tuple[int, ...] = (),
    classes: int | None = None,
    zigzag: bool = False,
    **more: Any,
) -> torch.Tensor:
    return F.cross_entropy(logits, target[: logits.shape[0]], weight, **more)


def _loss_of_classes(call: NodeCall, local: Mapping[str, Any], n: int) -> SpecialCall:
    local = {**local, "reduction": REDUCTIONS[local["reduction"]]}
    kwargs = _changed(local, reduction="mean", ignore_index=-100, label_smoothing=0.0)
    target = RuntimeCall("cross_entropy", likeness=_like_loss)
    args = local["self"], local["target"], call.shapes[0][1]
    return SpecialCall(target, args, kwargs, NodeCollectives(n, class_loss_actions(call)))


def _classes_of_rows(call: NodeCall, n: int) -> Iterator[Strategy]:
    logits = call.shapes[0]
    if len(call.shapes) == 2 and _divides(logits[1], n):
        yield Strategy((S(1), R), (I if any(call.carries) else R,), special="classes of rows")


def _loss_of_rows_and_classes(call: NodeCall, local: Mapping[str, Any], n: int) -> SpecialCall:
    kwargs = {k: v for k, v in local.items() if not k.isdigit()}
    kwargs["classes"] = call.shapes[0][1]
    target = RuntimeCall("cross_entropy_of_rows", likeness=_like_loss_of_rows)
    return SpecialCall(
        target, (local["0"], local["1"]), kwargs, NodeCollectives(n, class_loss_actions(call))
    )


def class_loss_actions(call: NodeCall) -> Actions:
    """The collectives of a loss with classes split over ranks: maxima, then sums, for each row."""
    nbytes = float(call.shapes[0][0] * max(4, call.operands[0].value.dtype.itemsize))
    sums = 3 if call.arguments.get("label_smoothing") else 2
    return (("all-reduce", nbytes), ("all-reduce", sums * nbytes))


def _like_loss(logits: torch.Tensor, target: torch.Tensor, _size: int, **more: Any) -> torch.Tensor:
    return F.cross_entropy(logits, target, **more)


def _changed(local: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """The arguments that differ from these defaults."""
    return {name: local[name] for name, default in defaults.items() if local[name] != default}


# Heads of queries, where the heads of keys and values cannot be split with them


def _head_strategies(call: NodeCall, n: int) -> Iterator[Strategy]:
    query, key = call.shapes[:2]
    if not call.arguments.get("enable_gqa") or len(query) < 3:
        return
    if not _divides(query[-3], n) or key[-3] == 1 or key[-3] % n == 0:
        return
    heads = len(query) - 3
    inputs: list[Placement] = [S(heads), R, R]
    for mask in call.shapes[3:]:
        place = len(mask) - 3
        inputs.append(S(place) if place >= 0 and mask[place] > 1 else R)
    draws: Draws = "own" if is_random(call.node) else ""
    yield Strategy(tuple(inputs), (S(heads),), special="own heads", draws=draws)


def _heads(call: NodeCall, local: Mapping[str, Any], n: int) -> SpecialCall:
    kwargs = _changed(local, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None)
    args = (local["query"], local["key"], local["value"], call.shapes[0][-3])
    return SpecialCall(RuntimeCall("attention_of_heads", likeness=_like_heads), args, kwargs)


def _like_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _heads: int, **more: Any
) -> torch.Tensor:
    shape = (*query.shape[:-2], *key.shape[-2:])
    values = (*shape[:-1], value.shape[-1])
    pair = key[..., :1, :, :].expand(shape), value[..., :1, :, :].expand(values)
    return F.scaled_dot_product_attention(query, *pair, **more)


# Rows of queries under a causal mask


def _row_strategies(call: NodeCall, n: int) -> Iterator[Strategy]:
    query = call.shapes[0]
    rows = len(query) - 2
    if not call.arguments.get("is_causal") or len(call.shapes) != 3 or query[rows] % n:
        return
    draws: Draws = "own" if is_random(call.node) else ""
    yield Strategy((S(rows), R, R), (S(rows),), special="causal rows", draws=draws)


def _rows(call: NodeCall, local: Mapping[str, Any], n: int) -> SpecialCall:
    kwargs = _changed(local, dropout_p=0.0, scale=None, enable_gqa=False)
    args = local["query"], local["key"], local["value"]
    return SpecialCall(RuntimeCall("attention_of_rows", likeness=_like_rows), args, kwargs)


def _like_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, zigzag: bool = False, **more: Any
) -> torch.Tensor:
    if zigzag:  # on average, rows of each rank attend to half of the keys
        keys = (key.shape[-2] + 1) // 2
        key, value = key[..., :keys, :], value[..., :keys, :]
    return F.scaled_dot_product_attention(query, key, value, **more)


# Rows of queries, keys and values, where keys and values go round (see `ring`)


def _ring_strategies(call: NodeCall, n: int) -> Iterator[Strategy]:
    """For four dimensions, as kernels require, without a mask or dropout."""
    if [len(shape) for shape in call.shapes] != [4, 4, 4] or is_random(call.node):
        return
    (samples, heads, rows, _), (others, groups, keys, _), value = call.shapes
    grouped = bool(call.arguments.get("enable_gqa")) and heads % groups == 0
    alike = samples == others and value[:3] == (samples, groups, keys)
    square = rows == keys or not call.arguments.get("is_causal")
    if alike and square and (grouped or heads == groups) and rows % n == keys % n == 0:
        yield Strategy((S(2), S(2), S(2)), (S(2),), special="ring")


def _ring(call: NodeCall, local: Mapping[str, Any], n: int) -> SpecialCall:
    kwargs = _changed(local, is_causal=False, scale=None)
    args = local["query"], local["key"], local["value"]
    target = RuntimeCall("ring_attention", likeness=partial(_like_ring, n))
    return SpecialCall(target, args, kwargs, ring_exchange(call, n))


def ring_exchange(call: NodeCall, n: int) -> NodeCollectives:
    """The rotations of a ring: keys and values, and in the backward their gradients too."""
    nbytes = float(sum(x.value.itemsize * math.prod(x.value.shape) for x in call.operands[1:3]))
    backward: Actions = (("rotation", 2 * nbytes),) if any(call.carries) else ()
    return NodeCollectives(n, (("rotation", nbytes),), backward, within=True)


def _like_ring(
    n: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool = False,
    zigzag: bool = False, scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """The work of the last rank, without the others: it has most to do where rows are in order, and
    formulas count what its causal kernel skips."""

    def rotate(row: torch.Tensor) -> Callable[[], torch.Tensor]:
        arriving = torch.empty_like(row)
        return lambda: arriving

    settings = (n, n), rotate, is_causal, zigzag, scale
    made: torch.Tensor = RingAttention.apply(query, key, value, *settings)  # type: ignore[no-untyped-call]
    return made


# Experts that are stacked in one matrix product


def _expert_strategies(call: NodeCall, n: int) -> Iterator[Strategy]:
    if [len(shape) for shape in call.shapes] == [2, 3, 1]:
        if _divides(call.shapes[1][0], n):
            yield Strategy((R, S(0), R), (P,), special="own experts")


def _experts(call: NodeCall, local: Mapping[str, Any], n: int) -> SpecialCall:
    rows, weight, ends = list(local.values())[:3]
    args = (call.node.target, rows, weight, ends, call.shapes[1][0])
    return SpecialCall(RuntimeCall("own_experts", likeness=_like_experts), args, {})


def _like_experts(
    operator: Callable[..., Any],
    rows: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    experts: int,
) -> Any:
    n = max(1, experts // weight.shape[0])
    product = operator(rows[: rows.shape[0] // n], weight, ends[: weight.shape[0]])
    return F.pad(product, (0, 0, 0, rows.shape[0] - product.shape[0]))


_STRATEGIES: Mapping[str, Callable[[NodeCall, int], Iterator[Strategy]]] = {
    "embedding": _embedding_strategies,
    "embedding_bag": _bag_strategies,
    "cross_entropy_loss": _loss_strategies,
    "runtime.cross_entropy_of_rows": _classes_of_rows,
    "scaled_dot_product_attention": _head_strategies,
    "grouped_mm_fallback": _expert_strategies,
    "_grouped_mm": _expert_strategies,
}
_CALLS: Mapping[str, Callable[[NodeCall, Mapping[str, Any], int], SpecialCall]] = {
    "vocabulary lookup": _embedding,
    "vocabulary bags": _bags,
    "own rows": _loss_of_rows,
    "own heads": _heads,
    "causal rows": _rows,
    "ring": _ring,
    "own experts": _experts,
    "classes": _loss_of_classes,
    "classes of rows": _loss_of_rows_and_classes,
}
