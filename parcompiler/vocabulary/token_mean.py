"""The loss as the mean over all counted tokens of a step, not the mean of micro-batches' means.

    micro-batch     loss = sum of its tokens / their number        2 tokens: 4.9, 8 tokens: 4.1
    mean of means   (4.9 + 4.1) / 2 = 4.5
    token mean      (2 · 4.9 + 8 · 4.1) / 10 = 4.26    as num_items_in_batch of transformers

The cross-entropy of the graph becomes a sum, and the runtime divides by the number of counted
targets in all micro-batches and data ranks, which it computes before the first forward.
"""

from __future__ import annotations

import torch
from torch import fx

from parcompiler.capture.effects import arguments_of, effects_of
from parcompiler.capture.rewriting import copied, inserted
from parcompiler.errors import InputError
from parcompiler.graph import Graph
from parcompiler.vocabulary.find import obstacle
from parcompiler.vocabulary.head_pattern import Criterion, WholeError, keep_whole, match_loss
from parcompiler.vocabulary.nodes import extract

SUM = 2  # of torch's reductions


def over_tokens(graph: Graph) -> Graph:
    """`graph` with the sum of its cross-entropy as the loss, and `counts` of its targets.

    Raises InputError where the loss is not the mean of a cross-entropy whose targets depend only on
    the batch.
    """
    try:
        criterion = match_loss(graph)
        if criterion.loss.reduction != "mean" or criterion.weight is not None:
            keep_whole("the cross-entropy is no plain mean")
        why = obstacle(graph, criterion.targets, effects_of(graph))
        if why is not None:
            keep_whole(f"its targets {why}")
    except WholeError as stop:
        message = (
            "loss_weights='tokens' needs a loss that is the mean of a cross-entropy over targets "
            f"of the batch ({stop.reason}): return F.cross_entropy(logits, targets), times a "
            "constant at most"
        )
        raise InputError(message) from stop
    copies = copied(graph)
    nodes = copies.nodes
    copy = nodes[criterion.node]
    values = {**arguments_of(criterion.node), "reduction": SUM}
    copy.args = tuple(nodes[v] if isinstance(v, fx.Node) else v for v in values.values())
    copy.kwargs = {}
    counts = _counts(graph, criterion)
    return copies.rewritten(fingerprint=f"{graph.fingerprint}-tokens", counts=counts)


def _counts(graph: Graph, criterion: Criterion) -> fx.Graph:
    """The number of targets of a micro-batch that are not ignored, from tensors of the batch."""
    small = extract(graph, criterion.targets)
    if any(n.op == "placeholder" and n.name in graph.by_node for n in small.nodes):
        keep_whole("its targets depend on buffers")
    output = small.output_node()
    (targets,) = output.all_input_nodes
    ne, ignored = torch.ops.aten.ne.Scalar, criterion.loss.ignore_index
    counted = inserted(output, ne, targets, ignored, like=targets)
    output.args = (inserted(output, torch.ops.aten.sum.default, counted, like=targets),)
    return small
