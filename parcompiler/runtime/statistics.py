"""What ranks tell each other of each row of logits, and what follows: the loss and its gradient.

    m = max m'      c = sum' exp(m' - m) / sum      sum = Σ sum' exp(m' - m)      P = P' c
    loss_i = -(1 - ε) w_y log P_y - ε/V Σ_c w_c log P_c      w = 1 and ε = 0 as a rule

>>> logits = torch.tensor([[0.0, 1.0], [2.0, 3.0]])  # one row, two columns on each of two ranks
>>> m, powers = logits.amax(1), logits.exp().sum(1)
>>> own = torch.stack([m, powers / m.exp(), torch.tensor([0.0, 2.0])], 1).unsqueeze(2)
>>> whole = combined(own)
>>> round((whole.largest + whole.total.log() - whole.label).item(), 4)
1.4402
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from parcompiler.runtime.vocabulary import Head


class Labels(NamedTuple):
    """Of each row: whether it counts, whether its label's class is here, and in which column."""

    counted: torch.Tensor
    owned: torch.Tensor
    columns: torch.Tensor


class Statistics(NamedTuple):
    """Numbers of each row [n]: those of own columns, or of all.

    `label` is the label's logit and `weight` its class weight, zero where its class is not here;
    `weighted` is Σ w L and `mass` Σ w. The last three are there where the loss asks for them.
    """

    largest: torch.Tensor
    total: torch.Tensor
    label: torch.Tensor
    weight: torch.Tensor | None = None
    weighted: torch.Tensor | None = None
    mass: torch.Tensor | None = None


class Factors(NamedTuple):
    """The gradient of the logits, row by row: P' `powers`, `label` at the label, -w `everyone`."""

    powers: torch.Tensor
    label: torch.Tensor
    everyone: torch.Tensor | None


def stacked(own: Statistics) -> torch.Tensor:
    """One tensor [numbers, n], for the exchange."""
    return torch.stack([item for item in own if item is not None])


def combined(parts: torch.Tensor) -> Statistics:
    """Those of all columns, from those of each rank [ranks, numbers, n] by its own largest."""
    largest = parts[:, 0].amax(0)
    total = (parts[:, 1] * torch.exp(parts[:, 0] - largest)).sum(0)
    return Statistics(largest, total, *parts[:, 2:].sum(0))


def undivided(own: Statistics) -> Statistics:
    """Those of own columns whose powers are not divided by their sum."""
    return own._replace(total=torch.ones_like(own.total))


def log_powers(whole: Statistics) -> torch.Tensor:
    """log P of each row's label."""
    return whole.label - whole.largest - whole.total.log()


def loss(head: Head, classes: int, labels: Labels, whole: Statistics) -> torch.Tensor:
    """The loss of a micro-batch, a scalar."""
    epsilon = head.label_smoothing
    rows = -log_powers(whole)
    if whole.weight is not None:
        rows = rows * whole.weight
    if whole.weighted is not None and whole.mass is not None and epsilon:
        everyone = whole.mass * (whole.largest + whole.total.log()) - whole.weighted
        rows = (1 - epsilon) * rows + epsilon / classes * everyone
    rows = torch.where(labels.counted, rows, 0)
    return head.scale * rows.sum() / _divisor(head, labels, whole)


def factors(
    head: Head, classes: int, labels: Labels, own: Statistics, whole: Statistics, share: float
) -> Factors:
    """The gradient of `share` times the loss by the logits, of own columns.

    Rows that do not count have none, even where nothing does and the loss is a NaN, as in eager.
    """
    epsilon = head.label_smoothing
    each = share * head.scale / _divisor(head, labels, whole)
    weight = torch.ones_like(whole.total) if whole.weight is None else whole.weight
    label = torch.where(labels.counted, each * weight * (1 - epsilon), 0)
    powers, everyone = label, None
    if epsilon and whole.mass is not None:
        everyone = torch.where(labels.counted, each * epsilon / classes, 0)
        powers = label + everyone * whole.mass
    ratio = own.total * torch.exp(own.largest - whole.largest) / whole.total
    at_label = torch.where(labels.owned, powers * log_powers(whole).exp() - label, 0)
    return Factors(powers * ratio, at_label, everyone)


def _divisor(head: Head, labels: Labels, whole: Statistics) -> torch.Tensor:
    """What the sum over rows is divided by."""
    if head.reduction != "mean":
        return whole.total.new_ones(())
    weight = torch.ones_like(whole.total) if whole.weight is None else whole.weight
    return torch.where(labels.counted, weight, 0).sum()
