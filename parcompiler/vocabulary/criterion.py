"""The end of a model: a cross-entropy, or log-softmax and nll, perhaps times a constant."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import fx

from parcompiler.graph import Graph, dtype_of, shape_of
from parcompiler.vocabulary.reading import arguments, is_same, name_of

CROSS_ENTROPIES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
_NONE = "the loss is no cross-entropy"
_REDUCTIONS = ("none", "mean", "sum")
_FORMS = ("view", "reshape", "squeeze", "unsqueeze", "flatten")


@dataclass(frozen=True, slots=True)
class Criterion:
    """loss = scale · cross_entropy(logits, targets, ...); the classes are dimension 1 (or 0).

    The logits must be log-probabilities already where `normalized`.
    """

    node: fx.Node
    logits: fx.Node
    targets: fx.Node
    weight: fx.Node | None
    reduction: str
    ignore_index: int
    label_smoothing: float = 0.0
    scale: float = 1.0
    normalized: bool = False


def criterion(graph: Graph) -> Criterion | str:
    """The cross-entropy that the loss of `graph` is, or why it is none."""
    node, scale, after = graph.loss, 1.0, ""
    while True:
        found = _cross_entropy(node)
        if found is not None:
            break
        name = name_of(node)
        operand = node.args[0] if node.args else None
        number = node.args[1] if len(node.args) > 1 else None
        single = isinstance(operand, fx.Node) and len(operand.users) == 1
        if name in ("add", "sub", "add_") and len(node.all_input_nodes) > 1:
            others = any(name_of(item) in CROSS_ENTROPIES for item in graph.fx_graph.nodes)
            return "the loss has other terms besides the cross-entropy" if others else _NONE
        if not single or not isinstance(operand, fx.Node):
            return f"a loss that needs whole logits ({name or node.name})"
        if name in ("mul", "div") and isinstance(number, int | float):
            if node.kwargs.get("rounding_mode") is not None:
                return f"a loss that needs whole logits ({name})"
            scale = scale * number if name == "mul" else scale / number
        elif name == "neg":
            scale = -scale
        elif name in ("mean", "sum") and not after and _over_all(node):
            if dtype_of(node) != dtype_of(operand):
                return f"a loss that needs whole logits ({name})"
            after = name
        elif not (is_same(node) or (name in _FORMS and operand.meta["val"].numel() == 1)):
            return f"a loss that needs whole logits ({name})"
        node = operand
    if isinstance(found, str):
        return found
    return _reduced(replace(found, scale=scale), after)


def _over_all(node: fx.Node) -> bool:
    """Whether a sum or mean goes over all elements."""
    return not shape_of(node) and len(node.args) == 1


def _reduced(found: Criterion, after: str) -> Criterion | str:
    """The criterion when its own reduction is followed by another, over all tokens."""
    count = math.prod(shape_of(found.targets))
    if found.reduction != "none":
        return found  # a sum or mean of one number
    if not after:
        if count != 1:
            return "a loss that needs that of each token"
        after = "sum"
    return replace(
        found, reduction="sum", scale=found.scale / count if after == "mean" else found.scale
    )


def _cross_entropy(node: fx.Node) -> Criterion | str | None:
    """The criterion of one node; None for a node of another kind."""
    given = arguments(node)
    match name_of(node):
        case "cross_entropy_loss":
            smoothing, normalized = float(given["label_smoothing"]), False
        case "nll_loss" | "nll_loss_nd" | "nll_loss2d":
            smoothing, normalized = 0.0, True
        case _:
            return None
    targets = given["target"]
    if targets.meta["val"].is_floating_point():
        return "targets that are probabilities need whole logits"
    return Criterion(
        node=node,
        logits=given["self"],
        targets=targets,
        weight=given["weight"],
        reduction=_REDUCTIONS[given["reduction"]],
        ignore_index=given["ignore_index"],
        label_smoothing=smoothing,
        normalized=normalized,
    )
