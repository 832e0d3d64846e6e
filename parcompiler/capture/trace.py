"""The fallback when `torch.export` refuses a model: resolve its Python by `fx.symbolic_trace`.

Symbolic tracing ignores what a forward does besides returning values (assigning attributes,
appending to lists), which is what export usually refuses. The traced module keeps the submodules
and goes through export like any other.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import fx, nn

from parcompiler.errors import CaptureError

Model = TypeVar("Model", bound=nn.Module)


def traced(model: nn.Module, kwargs: dict[str, Any]) -> fx.GraphModule:
    """`model` traced, with the arguments that are no tensors as constants."""
    constants = {k: v for k, v in kwargs.items() if not isinstance(v, torch.Tensor)}
    buffers = {name: (b, b._version, b.clone()) for name, b in model.named_buffers()}
    updated: list[str] = []
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        try:
            module = fx.symbolic_trace(model, concrete_args=constants or None)
        finally:
            for name, (buffer, version, value) in buffers.items():
                if buffer._version != version:
                    updated.append(name)
                    buffer.copy_(value)
        drawn = not torch.equal(before, torch.get_rng_state())
    if updated:
        message = f"the forward updates the buffer {updated[0]!r}, which tracing would leave out"
        raise CaptureError(message)
    if drawn:
        message = "the forward draws random numbers, which tracing would keep for ever"
        raise CaptureError(message)
    return module


def shared(model: Model) -> Model:
    """A copy of `model` with the same tensors, so that names and ties stay the model's.

    A forward may assign attributes and exchange modules, and tracing would leave those of its
    stand-ins in the model. A model that cannot be copied is returned as it is.
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = tensor
    try:
        return copy.deepcopy(model, memo)
    except Exception:  # whatever a user's attributes raise when they are copied
        return model
