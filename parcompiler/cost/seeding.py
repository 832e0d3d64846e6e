"""A backward that begins and ends as in a pipeline stage, so that it frees what it has used.

The gradients of a block's outputs are made when the backward begins, and nobody else holds them.
The gradient of a parameter is added to the one that is there already, and then it is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from parcompiler.cost.stand_in import stand_in, tensors


def roots_of(results: Mapping[fx.Node, Any], differentiable: Collection[str]) -> list[torch.Tensor]:
    """The results that receive a gradient."""
    found = (value for node, value in results.items() if node.name in differentiable)
    return [tensor for value in found for tensor in tensors(value) if tensor.requires_grad]


def seeding(
    roots: Sequence[torch.Tensor], held: Callable[[torch.Tensor], None] | None = None
) -> torch.Tensor | None:
    """A number whose backward gives the roots their gradients; None when there are no roots.

    `held` is told each of these gradients.
    """
    if not roots:
        return None
    seed: torch.Tensor = _Seed.apply(held, *roots)  # type: ignore[no-untyped-call]
    return seed


def drop_gradients(parameters: Iterable[torch.Tensor], kept: Callable[[int], None]) -> None:
    """Let the gradients of parameters be gone when they are complete; `kept` is told the bytes of
    each, for the first of a step stays."""
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_hook(_gone(parameter, kept))


def _gone(parameter: torch.Tensor, kept: Callable[[int], None]) -> Any:
    """A hook that hands on another tensor than the gradient."""
    other: torch.Tensor = stand_in(parameter.detach())

    def gone(gradient: torch.Tensor) -> torch.Tensor:
        kept(gradient.numel() * gradient.itemsize)
        return other

    return gone


class _Seed(torch.autograd.Function):
    """Nothing is computed from the roots, and their gradients are made in the backward."""

    @staticmethod
    def forward(
        ctx: Any, held: Callable[[torch.Tensor], None] | None, *roots: torch.Tensor
    ) -> torch.Tensor:
        ctx.held, ctx.likes = held, [stand_in(root) for root in roots]
        seed: torch.Tensor = stand_in(torch.empty((), device="meta"))
        return seed

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = tuple(map(torch.empty_like, ctx.likes))
        for gradient in gradients if ctx.held else ():
            ctx.held(gradient)
        return None, *gradients
