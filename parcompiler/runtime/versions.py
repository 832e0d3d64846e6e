"""Weight stashing: the backward of a micro-batch uses the weights that its forward used.

PipeDream (1806.03377, section 3.3) updates the weights after every backward, while micro-batches
that were forwarded with older ones are in flight. On rank 0 of 2, with the version that each
forward used:

    F0 v0   F1 v0   B0 U0 -> v1   F2 v1   B1 U1 -> v2   F3 v2 ...
                    [1]                   [2]

A forward runs on leaves that share the memory of the parameters. An update moves the gradients
from the leaves of its micro-batch to the parameters. [1] If a micro-batch in flight still needs
the memory of the current version (1 does), the parameters first move to new memory, and the old one
is stashed. [2] A version ends with its last micro-batch, so there are never more versions than
micro-batches in flight. Frozen parameters and buffers have no versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.func import functional_call

from parcompiler.runtime.stage import Stage

# The weights of a stage between two updates: leaves by the parameters' paths in its module.
Version = dict[str, torch.Tensor]


class Versions:
    """The weights that the micro-batches in flight on the stages of one rank have used."""

    def __init__(self) -> None:
        self._current: dict[int, Version] = {}  # of each stage that ran since its last update
        self._used: dict[tuple[int, int], Version] = {}  # by stage and micro-batch

    def forward(self, stage: Stage, j: int, i: int, arguments: Mapping[str, torch.Tensor]) -> Any:
        """Run stage `j` on micro-batch `i` with its current weights."""
        if j not in self._current:
            self._current[j] = _version(stage)
        version = self._used[j, i] = self._current[j]
        return functional_call(stage, version, kwargs=dict(arguments), tie_weights=False)

    def update(self, stage: Stage, j: int, i: int, step: Callable[[], object]) -> None:
        """Let `step` change the parameters of stage `j` by the gradients of micro-batch `i`."""
        version = self._used.pop((j, i))
        trained = [(path, p) for path, p in stage.named_parameters() if p.requires_grad]
        for path, parameter in trained:
            leaf = version[path]
            parameter.grad, leaf.grad = leaf.grad, None
        del version
        current = self._current.pop(j, None)
        if any(used is current for used in self._used.values()):
            for _, parameter in trained:
                parameter.data = parameter.data.clone()
        step()


def _version(stage: Stage) -> Version:
    """Leaves that share the memory of the parameters.

    They are made of `data`: after a `detach` they would share a version counter, and autograd would
    take an update of the parameters, in their new memory, for a change of the tensors that it
    saved.
    """
    leaves = {p: p.data.requires_grad_() for p in stage.parameters() if p.requires_grad}
    paths = stage.named_parameters(remove_duplicate=False)
    return {path: leaves[parameter] for path, parameter in paths if parameter in leaves}
