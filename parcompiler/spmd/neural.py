"""Rules of normalisations, pooling, attention and tables."""

from __future__ import annotations

from collections.abc import Mapping

from parcompiler.spmd.along import words
from parcompiler.spmd.call import Call
from parcompiler.spmd.rule import Rule
from parcompiler.spmd.strategy import Size

_PLANE = "*b (h) (w)"
LINES: Mapping[str, str] = {
    "max_pool1d": "!*b (w) -> *b (w)",
    "max_pool2d": f"!{_PLANE} -> {_PLANE}",
    "max_pool2d_with_indices": f"!{_PLANE} -> {_PLANE}, {_PLANE}",
    "avg_pool1d": "*b (w) -> *b (w)",
    "avg_pool2d": f"{_PLANE} -> {_PLANE}",
    "adaptive_avg_pool1d": "*b (w) -> *b (w)",
    "adaptive_avg_pool2d": f"{_PLANE} -> {_PLANE}",
    "upsample_nearest2d": f"{_PLANE} -> {_PLANE}",
    "upsample_bilinear2d": f"{_PLANE} -> {_PLANE}",
    "upsample_bicubic2d": f"{_PLANE} -> {_PLANE}",
}


def normalized(call: Call) -> Rule:
    """layer_norm and rms_norm: the normalised dimensions stay whole."""
    inner = len(call.arguments["normalized_shape"])
    last = " ".join(["1"] * inner)
    operands = [f"!*b {last}", last, last]
    joint = " + ".join([", ".join(operands[:2]), *operands[2:]])
    return Rule(f"{joint} -> *b {last}")


def batch_normalized(call: Call) -> Rule:
    """batch_norm: channels; in evaluation, when the statistics are given, all the rest too."""
    trains = call.arguments.get("training", call.arguments.get("use_input_stats", True))
    rest = words(len(call.shapes[0]), range(len(call.shapes[0])) if trains else ())
    rest[1] = "c"
    listed = " ".join(rest)
    others = ", ".join("!c" for _ in call.operands[1:])
    return Rule(f"!{listed}{', ' if others else ''}{others} -> {listed}")


def group_normalized(call: Call) -> Rule:
    """group_norm: the batch, or whole groups of channels."""
    listed = " ".join(["b", "g", *["1"] * (len(call.shapes[0]) - 2)])
    others = ", ".join("!g" for _ in call.operands[1:])
    groups = int(call.arguments["num_groups"])
    line = f"!{listed}{', ' if others else ''}{others} -> {listed}"
    return Rule(line, (("g", Size("num_groups", None, groups)),))


def leaky(call: Call) -> Rule:
    """prelu, with one slope or one for each channel."""
    rank = len(call.shapes[0])
    listed = words(rank)
    slope = listed[1] if rank > 1 else "1"
    return Rule(f"!{' '.join(listed)}, !{slope} -> {' '.join(listed)}")


def attended(call: Call) -> Rule | None:
    """Attention: over the batch, the heads (those of keys with theirs), rows, and value features.

    Rows of a causal mask count from the first, so that they stay whole.
    """
    query = call.shapes[0]
    shared = bool(call.arguments.get("enable_gqa", False)) and len(query) > 2
    rows = "(m)" if call.arguments.get("is_causal", False) else "m"
    outer = "*b h" if shared else "*b"
    mask = f", !{_mask(call, rows)}" if call.operand("attn_mask") else ""
    return Rule(f"!{outer} {rows} (e), !{outer} (t) (e), {outer} (t) d{mask} -> {outer} {rows} d")


def _mask(call: Call, rows: str) -> str:
    """The words of the mask: those of the scores, as many as it has."""
    mask = call.operand("attn_mask")
    assert mask is not None, "a mask"
    rank = len(mask.shape)
    shared = bool(call.arguments.get("enable_gqa", False)) and len(call.shapes[0]) > 2
    named = ["*b", "h"] if shared and rank > 2 else ["*b"]
    return " ".join([*named, rows, "(t)"] if rank > 1 else ["(t)"])


def looked_up(call: Call) -> Rule | None:
    """embedding: its features, or the indices; the vocabulary needs another computation."""
    if call.arguments.get("scale_grad_by_freq") or call.arguments.get("sparse"):
        return None
    return Rule("(v) h, !*b -> *b h")


def bagged(call: Call) -> Rule | None:
    """embedding_bag: its features; the other results only say where bags are."""
    if call.arguments.get("scale_grad_by_freq") or call.arguments.get("sparse"):
        return None
    inputs = ["(v) h", "!(i)", "!(o)", "!(i)"][: len(call.operands)]
    rest = ["(*x)"] * (len(call.results) - 1)
    return Rule(f"{', '.join(inputs)} -> {', '.join(['(o) h', *rest])}")


FAMILIES = {
    "embedding_bag": bagged,
    "embedding": looked_up,
    "layer_norm": normalized,
    "rms_norm": normalized,
    "batch_norm": batch_normalized,
    "instance_norm": batch_normalized,
    "group_norm": group_normalized,
    "prelu": leaky,
    "scaled_dot_product_attention": attended,
}
