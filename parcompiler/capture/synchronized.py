"""Which batch norms of a graph are SyncBatchNorms: their statistics are over all data ranks.

Traced, a SyncBatchNorm is the batch norm of one rank, whatever torch.distributed does meanwhile;
its node remembers what it was in `meta["synchronized"]`.

>>> model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
>>> with computing_as(alone):
...     exported = torch.export.export(model, (torch.ones(4, 2),), strict=False)
>>> mark(exported.graph_module.graph, model)
>>> is_synchronized(exported.graph_module.graph)
True
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from parcompiler.capture.patches import patched

Forward = Callable[[nn.SyncBatchNorm, torch.Tensor], torch.Tensor]


def computing_as(forward: Forward) -> AbstractContextManager[None]:
    """In this context, `forward` is what SyncBatchNorms compute, and subclasses where they call
    it."""
    return patched(nn.SyncBatchNorm, forward=lambda norm, input: forward(norm, input))


def alone(norm: nn.SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
    """The batch norm of one rank."""
    return _BatchNorm.forward(norm, x)


def mark(graph: fx.Graph, model: nn.Module) -> None:
    """Mark the nodes of SyncBatchNorms in training; `model` is the traced one."""
    paths = {
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.SyncBatchNorm) and module.training
    }
    for node in graph.nodes if paths else ():
        stack = list(node.meta.get("nn_module_stack", {}).values())
        if node.target is torch.ops.aten.batch_norm.default and stack and stack[-1][0] in paths:
            node.meta["synchronized"] = True


def is_synchronized(graph: fx.Graph) -> bool:
    """Whether a graph has such a batch norm."""
    return any("synchronized" in node.meta for node in graph.nodes)
