"""The CTC loss (Graves et al. 2006) as an operator whose shapes need no values.

torch's own also returns a table, with columns for the longest target, and how long that is only
values say: no graph can be made of it. Here the losses alone are returned, and the backward makes
the table again, by the same kernel.

>>> scores = torch.randn(5, 1, 3).log_softmax(-1)  # [time, rows, classes]
>>> given = scores, torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2])
>>> torch.equal(ctc_loss(*given), torch.nn.functional.ctc_loss(*given))
True
"""

from __future__ import annotations

import math
from typing import Any

import torch

_ARGUMENTS = (
    "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, "
    "bool zero_infinity"
)
_library = torch.library.Library("parcompiler", "FRAGMENT")
_library.define(f"ctc_losses({_ARGUMENTS}) -> Tensor")
_library.define(f"ctc_gradient(Tensor gradient, {_ARGUMENTS}) -> Tensor")


def _losses(*arguments: Any) -> torch.Tensor:
    """The losses [n]."""
    losses: torch.Tensor = torch.ops.aten._ctc_loss.Tensor(*arguments)[0]
    return losses


def _losses_without_data(log_probs: torch.Tensor, *_: Any) -> torch.Tensor:
    """What `_losses` returns, without values."""
    return log_probs.new_empty(log_probs.shape[1])


def _gradient(gradient: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """The gradient of the logarithms of probabilities [time, n, classes]."""
    *tensors, blank, zero_infinity = arguments
    results = torch.ops.aten._ctc_loss.Tensor(*arguments)
    backward = torch.ops.aten._ctc_loss_backward.Tensor
    result: torch.Tensor = backward(gradient, *tensors, *results, blank, zero_infinity)
    return result


def _gradient_without_data(gradient: torch.Tensor, log_probs: torch.Tensor, *_: Any) -> Any:
    """What `_gradient` returns, without values."""
    return log_probs.new_empty(log_probs.shape)


_library.impl("ctc_losses", _losses, "CompositeExplicitAutograd")
_library.impl("ctc_gradient", _gradient, "CompositeExplicitAutograd")
torch.library.register_fake("parcompiler::ctc_losses", _losses_without_data, lib=_library)
torch.library.register_fake("parcompiler::ctc_gradient", _gradient_without_data, lib=_library)


class CtcLosses(torch.autograd.Function):
    """The losses of rows [n]: logarithms of probabilities [time, n, classes], targets [n, longest]
    or one behind another, the lengths of both [n], the class that is blank, and whether gradients
    of infinite losses are zero."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        """Run torch's kernel."""
        *tensors, blank, zero_infinity = arguments
        ctx.save_for_backward(*tensors)
        ctx.settings = blank, zero_infinity
        losses: torch.Tensor = torch.ops.parcompiler.ctc_losses(*arguments)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Run torch's kernel of the gradient."""
        arguments = *ctx.saved_tensors, *ctx.settings
        return torch.ops.parcompiler.ctc_gradient(gradients[0], *arguments), *[None] * 5


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """`torch.ctc_loss`: log_probs [time, n, classes] or [time, classes]; `reduction` 0 for none, 1
    for the mean (each row divided by its length), 2 for the sum."""
    batched = log_probs.dim() == 3
    rows = log_probs if batched else log_probs.unsqueeze(1)
    tensors = (targets, *map(torch.as_tensor, (input_lengths, target_lengths)))
    if not batched:
        tensors = tensors[0], *(item.reshape(1) for item in tensors[1:])
    targets, *lengths = (item.to(log_probs.device) for item in tensors)
    losses: torch.Tensor = CtcLosses.apply(rows, targets, *lengths, blank, zero_infinity)  # type: ignore[no-untyped-call]
    if zero_infinity:
        losses = losses.masked_fill(losses == math.inf, 0.0)
    if reduction == 1:
        return (losses / lengths[1].clamp_min(1).to(losses.dtype)).mean()
    if reduction == 2:
        return losses.sum()
    return losses if batched else losses.squeeze(0)
