"""The layers of the vocabulary in one process: the specification that ranks must meet."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from parcompiler.graph import EmbeddingLookup, VocabularyHead

Values = Mapping[str, Tensor]  # by the names of placeholders


def lookup(item: EmbeddingLookup, weight: Tensor, values: Values) -> Tensor:
    """Rows of `weight` [V, h] for the indices that `values` give."""
    return F.embedding(computed(item.indices, values), weight, item.padding_idx)


def head(
    item: VocabularyHead,
    x: Tensor,
    weight: Tensor,
    values: Values,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
) -> Tensor:
    """The loss of `x` [n, h] under `weight` [V, h]; `bias` and `class_weight` have V elements."""
    logits = F.linear(x, weight, None if bias is None else bias.reshape(-1))
    if item.logits is not None:
        logits = computed(item.logits, {"logits": logits})
    loss = F.cross_entropy(
        logits,
        computed(item.targets, values),
        class_weight,
        ignore_index=item.loss.ignore_index,
        reduction=item.loss.reduction,
        label_smoothing=item.loss.label_smoothing,
    )
    return loss * item.loss.scale


def computed(graph: fx.Graph, values: Values) -> Tensor:
    """The result of a small graph of operators on `values`."""
    module = fx.GraphModule(torch.nn.Module(), graph)
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    result: Tensor = fx.Interpreter(module).run(*(values[name] for name in names))
    return result
