"""Adaptive softmax (Grave et al. 2016, arXiv 1609.04309) without questions about the batch.

torch's module gives each cluster of rare words the rows with targets in it, a number that depends
on the batch. A graph has fixed shapes: here every cluster computes all rows, and other rows are
masked, with the same loss and gradient. A target that is no class raises, as in torch.

>>> layer = nn.AdaptiveLogSoftmaxWithLoss(8, 9, cutoffs=[2, 5], div_value=2)
>>> x, target = torch.randn(3, 8), torch.tensor([0, 8, 4])
>>> wanted, found = layer(x, target), on_all_rows(layer, x, target)
>>> torch.testing.assert_close(found.output, wanted.output)
>>> torch.testing.assert_close(found.loss, wanted.loss)
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def on_all_rows(
    layer: nn.AdaptiveLogSoftmaxWithLoss, input_: torch.Tensor, target_: torch.Tensor
) -> Any:
    """The log-probability of each target, and the mean loss: x [n, h] or [h], targets [n] or []."""
    batched = target_.dim() == 1
    if target_.dim() > 1 or input_.dim() != target_.dim() + 1:
        message = (
            f"an adaptive softmax takes rows [n, h] and targets [n] ({tuple(input_.shape)} and "
            f"{tuple(target_.shape)} given)"
        )
        raise RuntimeError(message)
    x, target = (input_, target_) if batched else (input_.unsqueeze(0), target_.unsqueeze(0))
    output = x.new_zeros(target.shape[0])
    column = target  # of the head; a target that is no class has none
    for k, (low, high) in enumerate(pairwise(layer.cutoffs)):
        mine = (target >= low) & (target < high)
        index = (target - low).clamp(0, high - low - 1).unsqueeze(1)
        powers = F.log_softmax(layer.tail[k](x), dim=1)
        output = torch.where(mine, powers.gather(1, index).squeeze(1), output)
        column = torch.where(mine, layer.shortlist_size + k, column)
    powers = F.log_softmax(layer.head(x), dim=1)
    output = output + powers.gather(1, column.unsqueeze(1)).squeeze(1)
    loss = (-output).mean()
    return _Result(output if batched else output.squeeze(0), loss)


_Result: Any = nn.modules.adaptive._ASMoutput
