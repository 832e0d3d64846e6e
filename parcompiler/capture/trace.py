"""The fallback when `torch.export` refuses a model: resolve its Python by `fx.symbolic_trace`.

Symbolic tracing ignores what a forward does besides returning values (assigning attributes,
appending to lists), which is what export usually refuses. The traced module keeps the submodules
and goes through export like any other.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx, nn


def traced(model: nn.Module, kwargs: dict[str, Any]) -> fx.GraphModule:
    """`model` traced, with the arguments that are no tensors as constants; a copy."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = tensor  # tensors are shared, so that names and ties stay the model's
    duplicate = copy.deepcopy(model, memo)
    constants = {k: v for k, v in kwargs.items() if not isinstance(v, torch.Tensor)}
    return fx.symbolic_trace(duplicate, concrete_args=constants or None)
