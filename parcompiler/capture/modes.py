"""Training or evaluation: a program computes in the modes that the model had when it was captured.

>>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
>>> _ = model[1].eval()
>>> modes_of(model)
Modes(evaluating=('1',), dropouts=0, norms=1, unfollowed='')
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from parcompiler.graph import Modes


def modes_of(model: nn.Module) -> Modes:
    """The modes that the modules of a model are in."""
    evaluating = {name: m for name, m in model.named_modules() if not m.training}
    dropouts = norms = 0  # modules that would draw, or update statistics, in training
    for module in evaluating.values():
        if isinstance(module, _DropoutNd):
            dropouts += module.p > 0
        elif isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            dropouts += module.dropout > 0
        elif isinstance(module, _NormBase):
            norms += module.running_mean is not None
    return Modes(tuple(evaluating), dropouts, norms)


@contextmanager
def in_modes(model: nn.Module, modes: Modes) -> Iterator[None]:
    """In this context, a model has the modes that it was captured in; afterwards its previous
    ones."""
    before = [(module, module.training) for module in model.modules()]
    evaluating = set(modes.evaluating)
    try:
        for name, module in model.named_modules():
            module.training = name not in evaluating  # not `train`, which a model may override
        yield
    finally:
        for module, mode in before:
            module.training = mode
