"""Layers whose activations are recomputed: their backward runs them a second time.

    forward     x ──► layer ──► y           only x is kept
    backward    x ──► layer ──► …           activations for the layer's backward, again
                dx ◄── layer ◄── dy

The second run is bitwise equal: the same random numbers (see `rng`), the same weights (also when
they have been updated since, see `versions`), and linear layers that leave the same products for
later (see `deferred`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from parcompiler.again import once
from parcompiler.runtime import axis, deferred, rng


def recomputed(layer: nn.Module, *tensors: torch.Tensor) -> Any:
    """`layer(*tensors)`, keeping only `tensors` for the backward.

    The layer runs twice, so it must have no side effects.
    """
    if not torch.is_grad_enabled():
        return layer(*tensors)
    return checkpoint(_with_weights(layer), *tensors, use_reentrant=False, context_fn=_contexts)


def _with_weights(layer: nn.Module) -> Callable[..., Any]:
    """The layer bound to its current weights."""
    weights: dict[str, torch.Tensor] = dict(layer.named_parameters())

    def call(*tensors: torch.Tensor) -> Any:
        if all(weights[name] is weight for name, weight in layer.named_parameters()):
            return layer(*tensors)
        return functional_call(layer, weights, tensors)

    return call


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of the forward and of its repetition."""
    draws, deferral, groups = rng.current(), deferred.current(), axis.all_active()
    return once(), _again(draws.resumed() if draws else None, deferral, groups)


@contextmanager
def _again(
    draws: rng.SeededDraws | None,
    deferral: deferred.Deferral | None,
    groups: tuple[axis.Axis, ...],
) -> Iterator[None]:
    """In this context, layers run in the contexts of the forward."""
    leaving = deferral.forward() if deferral else nullcontext()
    with once(), draws or nullcontext(), leaving, axis.within(*groups):
        yield
