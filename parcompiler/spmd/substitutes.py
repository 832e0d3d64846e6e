"""The calls of the runtime that stand for operators whose strategy is special (see `special`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from parcompiler.spmd.call import Call
from parcompiler.spmd.exchange import Exchange, RuntimeCall, Said

REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True, slots=True)
class Substitute:
    """A call: `local` are the arguments of the operator by name, as a rank has them."""

    target: RuntimeCall
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    exchange: Exchange | None = None


def substitute(special: str, call: Call, local: Mapping[str, Any], n: int) -> Substitute:
    """The call that computes a special strategy on a rank with these `local` arguments."""
    return _MAKERS[special](call, local, n)


def _lookup(call: Call, local: Mapping[str, Any], n: int) -> Substitute:
    """Rows of a table of which a rank has some."""
    padding = local["padding_idx"]
    return Substitute(
        RuntimeCall("embedding", likeness=_like_lookup),
        (local["indices"], local["weight"], call.shapes[0][0]),
        {"padding_idx": padding} if padding >= 0 else {},
    )


def _like_lookup(
    indices: torch.Tensor, weight: torch.Tensor, size: int, padding_idx: int = -1
) -> torch.Tensor:
    rows = torch.embedding(weight, indices, padding_idx)
    return rows.masked_fill((indices < size).unsqueeze(-1), 0)


def _bags(call: Call, local: Mapping[str, Any], n: int) -> Substitute:
    """Sums of rows of a table of which a rank has some."""
    kwargs = {"include_last_offset": True} if local["include_last_offset"] else {}
    weights = local["per_sample_weights"]
    return Substitute(
        RuntimeCall("embedding_bag"),
        (local["indices"], local["weight"], local["offsets"], call.shapes[0][0]),
        kwargs if weights is None else {**kwargs, "per_sample_weights": weights},
    )


def _rows(call: Call, local: Mapping[str, Any], n: int) -> Substitute:
    """The loss of a rank's rows."""
    kwargs = _loss_arguments(local)
    if local["weight"] is not None:
        kwargs = {"weight": local["weight"], **kwargs}
    target = RuntimeCall("cross_entropy_of_rows", likeness=_like_loss_of_rows)
    return Substitute(target, (local["self"], local["target"]), kwargs)


def _like_loss_of_rows(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, **more: Any
) -> torch.Tensor:
    return F.cross_entropy(logits, target[: logits.shape[0]], weight, **more)


def _classes(call: Call, local: Mapping[str, Any], n: int) -> Substitute:
    """The loss when each rank has the logits of some classes."""
    rows, classes = call.shapes[0]
    kwargs = _loss_arguments(local)
    reduction = REDUCTIONS[local["reduction"]]
    if reduction != "mean":
        kwargs = {"reduction": reduction, **kwargs}
    nbytes = float(rows * max(4, call.operands[0].value.dtype.itemsize))
    sums = 3 if local["label_smoothing"] else 2
    said: Said = (("all-reduce", nbytes), ("all-reduce", sums * nbytes))
    target = RuntimeCall("cross_entropy", likeness=_like_loss)
    return Substitute(target, (local["self"], local["target"], classes), kwargs, Exchange(n, said))


def _like_loss(logits: torch.Tensor, target: torch.Tensor, _size: int, **more: Any) -> torch.Tensor:
    return F.cross_entropy(logits, target, **more)


def _loss_arguments(local: Mapping[str, Any]) -> dict[str, Any]:
    """What differs from the defaults of a cross entropy."""
    found = {"ignore_index": local["ignore_index"], "label_smoothing": local["label_smoothing"]}
    defaults = {"ignore_index": -100, "label_smoothing": 0.0}
    return {name: value for name, value in found.items() if value != defaults[name]}


def _heads(call: Call, local: Mapping[str, Any], n: int) -> Substitute:
    """Attention of a rank's heads with the keys and values that they share."""
    wanted = ("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False), ("scale", None)
    kwargs = {name: local[name] for name, default in wanted if local[name] != default}
    args = (local["query"], local["key"], local["value"], call.shapes[0][-3])
    return Substitute(RuntimeCall("attention_of_heads", likeness=_like_heads), args, kwargs)


def _like_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _heads: int, **more: Any
) -> torch.Tensor:
    shape = (*query.shape[:-2], *key.shape[-2:])
    values = (*shape[:-1], value.shape[-1])
    pair = key[..., :1, :, :].expand(shape), value[..., :1, :, :].expand(values)
    return F.scaled_dot_product_attention(query, *pair, **more)


def _experts(call: Call, local: Mapping[str, Any], n: int) -> Substitute:
    """The rows of a rank's experts; the operator itself is an argument."""
    rows, weight, ends = list(local.values())[:3]
    args = (call.node.target, rows, weight, ends, call.shapes[1][0])
    return Substitute(RuntimeCall("own_experts", likeness=_like_experts), args, {})


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


_MAKERS: Mapping[str, Callable[[Call, Mapping[str, Any], int], Substitute]] = {
    "vocabulary lookup": _lookup,
    "vocabulary bags": _bags,
    "own rows": _rows,
    "own heads": _heads,
    "own experts": _experts,
    "classes": _classes,
}
