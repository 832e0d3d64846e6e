"""Embeddings whose rows are on several ranks: each looks up its rows, and the sum is the whole.

>>> table, words = torch.arange(8.0).view(4, 2), torch.tensor([3, 0])
>>> parts = [embed(table[:2], words, Span(0, 2)), embed(table[2:], words, Span(2, 2))]
>>> [part.tolist() for part in parts]
[[[0.0, 0.0], [0.0, 1.0]], [[6.0, 7.0], [0.0, 0.0]]]
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from parcompiler.errors import InputError
from parcompiler.pieces import Span
from parcompiler.runtime.mixed_precision import gradient_of


class Located(NamedTuple):
    """Words on this rank: whether each is `owned`, and its row; for others any row of the rank."""

    owned: torch.Tensor
    rows: torch.Tensor


def located(words: torch.Tensor, span: Span, rows: int) -> Located:
    """Locate words on the rank that holds the rows `span`, padded to `rows`.

    Words of other ranks get different rows, so that adding zeros to them is not serialised.
    """
    words = words.long() - span.start
    owned = (words >= 0) & (words < span.size)
    elsewhere = torch.arange(words.numel(), device=words.device).view_as(words) % rows
    return Located(owned, torch.where(owned, words, elsewhere))


def embed(weight: torch.Tensor, words: torch.Tensor, span: Span) -> torch.Tensor:
    """Rows of `weight` [k, h] for `words` [...], zeros for words of other ranks: [..., h]."""
    at = located(words, span, weight.shape[0])
    rows = weight.detach()[at.rows]
    return rows.masked_fill_(~at.owned.unsqueeze(-1), 0)


def embed_backward(
    weight: torch.Tensor,
    words: torch.Tensor,
    span: Span,
    gradient: torch.Tensor,
    padding: int | None = None,
) -> None:
    """Add the gradient [..., h] of the whole lookup to the rows here; the row `padding` gets
    none."""
    if not weight.requires_grad:
        return
    at = located(words, span, weight.shape[0])
    owned = at.owned if padding is None else at.owned & (words != padding)
    summed, width = gradient_of(weight), weight.shape[1]
    gradient = torch.where(owned.unsqueeze(-1), gradient, 0).to(weight.dtype)
    summed.index_add_(0, at.rows.reshape(-1), gradient.reshape(-1, width).to(summed.dtype))


def check(numbers: torch.Tensor, size: int, subject: str, ignored: int | None = None) -> None:
    """Refuse numbers outside [0, size) other than `ignored`, as eager mode does; a sum of rows
    would not.

    Raises InputError on the CPU; elsewhere it is an assertion of the device.
    """
    wrong = (numbers < 0) | (numbers >= size)
    if ignored is not None:
        wrong &= numbers != ignored
    if numbers.device.type != "cpu":
        torch._assert_async(~wrong.any(), f"{subject}: outside of 0 ... {size - 1}")
    elif wrong.any():
        one = int(numbers[wrong][0])
        also = "" if ignored is None else f" or {ignored}, which is ignored"
        message = f"{subject} must be from 0 to {size - 1}{also} ({one} given)"
        raise InputError(message)
