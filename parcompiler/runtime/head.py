"""The head of a model and its loss on a rank's rows of the vocabulary, pass by pass.

    x [n, h]    W rows of the rank [k, h]    Y = x Wᵀ + b    L = logits(Y), elementwise    d = dL/dY

    S           Y; m' = max L; sum' = Σ exp(L - m'); P' = exp(L - m') / sum'     of its columns
                vocab-2 also: A = (P' d) W
    exchange    m = max m'; sum = Σ sum' exp(m' - m)                             over ranks
    gradient    c = sum' exp(m' - m) / sum, so that P = P' c; g = d loss / d loss_i; y the label
                dx = g c A + g (P_y - 1) d_y W_y
    loss        loss_i = -(1 - ε) w_y log P_y - ε/V Σ_c w_c log P_c     w = 1 and ε = 0 as a rule
    T           W.grad += (P' d)ᵀ (g c x), and g (P_y - 1) d_y x to row y

The algorithms are those of "Balancing Pipeline Parallelism with Vocabulary Parallelism" (arXiv
2411.05288): vocab-1 is its Algorithm 1 and vocab-2 its Algorithm 2; naive and interlaced ask for m
before they compute powers. Two things differ. The column of the label is kept out of P': within it
P_y - 1, small where a model is good, would be rounded to the precision of the weights. And factors
of the rows of P' [n, k] are applied to the rows of A and x [n, h] instead, so that only the two
products read P' again.

>>> logits = torch.tensor([[0.0, 1.0], [2.0, 3.0]])  # one row, two columns on each of two ranks
>>> m, powers = logits.amax(1), logits.exp().sum(1)
>>> parts = torch.stack([m, powers / m.exp(), torch.tensor([0.0, 2.0])], 1).unsqueeze(2)
>>> whole = combined(parts)
>>> round((whole.largest + whole.total.log() - whole.label).item(), 4)
1.4402
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from parcompiler.pieces import Shard, Span
from parcompiler.runtime.axis import current
from parcompiler.runtime.lookup import located
from parcompiler.runtime.mixed_precision import gradient_of, widen
from parcompiler.runtime.softmax import Softmax, column_of_rows, precision
from parcompiler.runtime.vocabulary import Head, Vocabulary


class Labels(NamedTuple):
    """For each row: whether it counts, whether its label's class is on this rank, and in which
    column.

    `number` is the count of such rows on all context ranks, if the mean is over those.
    """

    counted: torch.Tensor
    owned: torch.Tensor
    columns: torch.Tensor
    number: torch.Tensor | None = None


class Statistics(NamedTuple):
    """Numbers for each row [n]: over a rank's columns, or over all.

    `label` is the label's logit and `weight` its class weight, zero where its class is not here;
    `weighted` is Σ w L and `mass` Σ w. The last three are None where the loss does not need them.
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


class HeadRows(NamedTuple):
    """The rows of the head on a rank, of `classes` in all."""

    head: Head
    weight: torch.Tensor  # [k, h], zeros after the rows of `span`
    bias: torch.Tensor | None  # [k], or [1, k] as in the model
    class_weight: torch.Tensor | None  # [k], zeros where no class is; None where all weigh 1
    softmax: Softmax
    span: Span
    classes: int


@dataclass(eq=False)
class HeadLogits:
    """The tensors that a rank keeps for one micro-batch between S and T.

    `powers` [n, k] are Y at first, then P' d without the labels' columns. `slope` [n] is d of the
    labels' columns; `slopes` [n, k] are w d, kept where smoothing gives every class a gradient.
    """

    x: torch.Tensor
    labels: Labels
    powers: torch.Tensor
    largest: torch.Tensor
    statistics: Statistics | None = None
    slope: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    product: torch.Tensor | None = None  # A = (P' d) W


class MatrixPool:
    """Matrices [n, k] of finished micro-batches, reused by later ones: new memory is slow."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, rows: int, like: torch.Tensor) -> torch.Tensor:
        """A matrix with a column for each row of `like`; its contents are arbitrary."""
        shape = (rows, like.shape[0])
        if self._free and self._free[-1].shape == shape:
            return self._free.pop()
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def give(self, matrix: torch.Tensor) -> None:
        """Give a matrix back for reuse."""
        self._free.append(matrix)


def rows_of_head(vocabulary: Vocabulary, *, fused: bool = False) -> HeadRows:
    """The rows of the head on this rank."""
    head = vocabulary.head
    assert head is not None
    weight, span = vocabulary.tensor(head.weight), vocabulary.span(head.weight)
    bias = vocabulary.tensor(head.bias) if head.bias else None
    class_weight: torch.Tensor | None = None
    if head.class_weight:
        class_weight = vocabulary.tensor(head.class_weight).detach().to(precision(weight.dtype))
    elif head.label_smoothing:
        class_weight = weight.new_zeros(len(weight), dtype=precision(weight.dtype))
        class_weight[: span.size] = 1
    logits: Callable[[torch.Tensor], torch.Tensor] | None = None
    if head.logits:
        logits = getattr(vocabulary, "logits")  # noqa: B009 (of the emitted class)
    softmax = Softmax(span.size, logits, class_weight if head.label_smoothing else None, fused)
    return HeadRows(head, weight, bias, class_weight, softmax, span, vocabulary.size[head.weight])


def labels_of(rows: HeadRows, targets: torch.Tensor) -> Labels:
    """The labels of rows [n]; `targets` may be those of all context ranks."""
    counted, number = targets != rows.head.ignore_index, None
    if rows.head.sizes:
        axis, shard = current(rows.head.axis), Shard(0, rows.head.sizes, rows.head.zigzag)
        number = counted.sum()
        targets, counted = (axis.own(x, shard) for x in (targets, counted))
    at = located(targets, rows.span, len(rows.weight))
    return Labels(counted, at.owned & counted, at.rows, number)


@torch.no_grad()
def products(rows: HeadRows, x: torch.Tensor, labels: Labels, matrices: MatrixPool) -> HeadLogits:
    """The beginning of S: Y = x Wᵀ + b of the rank's rows."""
    y = matrices.take(len(x), rows.weight)
    if rows.bias is None:
        torch.mm(x, rows.weight.t(), out=y)
    else:
        torch.addmm(rows.bias, x, rows.weight.t(), out=y)
    return HeadLogits(x, labels, y, x.new_empty(len(x), dtype=precision(y.dtype)))


@torch.no_grad()
def find_largest(rows: HeadRows, logits: HeadLogits) -> None:
    """S of naive: m' of each row."""
    for block in rows.softmax.blocks(logits.powers):
        logits.largest[block] = rows.softmax.largest(logits.powers[block])


@torch.no_grad()
def normalize(rows: HeadRows, logits: HeadLogits, m: torch.Tensor | None = None) -> None:
    """Turn Y into P' d, or with the largest logits `m` of all ranks into exp(L - m) d, and note the
    statistics of this rank's columns."""
    n, dtype, columns = len(logits.x), logits.largest.dtype, logits.labels.columns
    total, label, weighted = (logits.largest.new_zeros(n) for _ in range(3))
    sloped = rows.softmax.function is not None
    slopes = torch.empty_like(logits.powers) if sloped and rows.head.label_smoothing else None
    slope = torch.ones_like(total) if sloped else None
    for block in rows.softmax.blocks(logits.powers):
        products, m_of_block = logits.powers[block], None if m is None else m[block]
        result = rows.softmax.of_block(products, columns[block], m_of_block)
        if result.powers.data_ptr() != products.data_ptr():  # they did not fit in place
            if result.powers.shape == logits.powers.shape:
                logits.powers = result.powers
            else:
                products.copy_(result.powers)
        logits.largest[block], total[block], label[block] = result[1:4]
        if result.weighted is not None:
            weighted[block] = result.weighted
        if slope is not None and result.slope is not None:
            slope[block] = column_of_rows(result.slope, columns[block]).to(dtype)
            if slopes is not None and rows.class_weight is not None:
                slopes[block] = result.slope * rows.class_weight
    logits.slope, logits.slopes = slope, slopes
    owned = logits.labels.owned
    label = torch.where(owned, label, 0)
    more: tuple[torch.Tensor, ...] = ()
    if rows.class_weight is not None:
        weight = torch.where(owned, rows.class_weight[columns], 0)
        more = (weight, weighted, rows.class_weight.sum().expand(n))
    logits.statistics = Statistics(logits.largest, total, label, *more)
    others = column_of_rows(logits.powers, columns).masked_fill_(owned, 0)
    logits.powers.scatter_(1, columns.unsqueeze(1), others.unsqueeze(1))  # drop the labels


@torch.no_grad()
def weigh(rows: HeadRows, logits: HeadLogits) -> None:
    """A = (P' d) W of the rank's rows [n, h]: in S of vocab-2, in T of the others."""
    logits.product = torch.mm(logits.powers, rows.weight)


@torch.no_grad()
def input_gradient(rows: HeadRows, logits: HeadLogits, factors: Factors) -> torch.Tensor:
    """The rank's part of the gradient of x [n, h]: g c A + g (P_y - 1) d_y W_y. A is freed."""
    assert logits.product is not None
    dtype = factors.powers.dtype
    label = _at_label(logits, factors)
    gradient = logits.product.to(dtype).mul_(factors.powers.unsqueeze(1))
    gradient.addcmul_(label.unsqueeze(1), rows.weight[logits.labels.columns].to(dtype))
    if factors.everyone is not None and rows.class_weight is not None:
        if logits.slopes is not None:
            weighed = torch.mm(logits.slopes, rows.weight)
        else:  # d is one: a single row
            weighed = torch.mm(rows.class_weight.to(rows.weight.dtype).unsqueeze(0), rows.weight)
        gradient.addcmul_(factors.everyone.unsqueeze(1), weighed.to(dtype), value=-1)
    logits.product = None
    return gradient.to(logits.x.dtype)


@torch.no_grad()
def weight_gradient(rows: HeadRows, logits: HeadLogits, factors: Factors) -> None:
    """W.grad += (P' d)ᵀ (g c x), and g (P_y - 1) d_y x to the labels' rows; likewise for the
    bias."""
    label, columns = _at_label(logits, factors), logits.labels.columns
    if rows.weight.requires_grad:
        x = _scaled(logits.x, factors.powers)
        if rows.weight.grad is None:
            rows.weight.grad = torch.mm(logits.powers.t(), x)
            widen(rows.weight)
        else:
            _add_product(rows.weight.grad, logits.powers.t(), x)
        gradient = gradient_of(rows.weight)
        gradient.index_add_(0, columns, _scaled(logits.x, label).to(gradient.dtype))
    if rows.bias is not None and rows.bias.requires_grad:
        dtype = rows.bias.dtype
        gradient = gradient_of(rows.bias)
        factor = factors.powers.to(dtype).unsqueeze(1)
        _add_product(gradient.view(-1, 1), logits.powers.t(), factor)
        gradient.view(-1).index_add_(0, columns, label.to(dtype).to(gradient.dtype))
    if factors.everyone is not None:
        _subtract_everyone(rows, logits, factors.everyone)


def _at_label(logits: HeadLogits, factors: Factors) -> torch.Tensor:
    """g (P_y - 1) d_y of each row."""
    return factors.label if logits.slope is None else factors.label * logits.slope


def _scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Rows times their factors, in the precision of x."""
    return (x * factor.unsqueeze(1)).to(x.dtype)


def _subtract_everyone(rows: HeadRows, logits: HeadLogits, everyone: torch.Tensor) -> None:
    """Subtract the smoothing's part for every class from the gradients of weight and bias."""
    assert rows.class_weight is not None
    for parameter in (rows.weight, rows.bias):
        if parameter is None or not parameter.requires_grad:
            continue
        dtype = parameter.dtype
        x = (
            _scaled(logits.x, everyone)
            if parameter is rows.weight
            else everyone.to(dtype).unsqueeze(1)
        )
        if logits.slopes is not None:
            change = (logits.slopes.t(), x)
        else:
            change = (rows.class_weight.to(dtype).unsqueeze(1), x.sum(0, keepdim=True))
        _add_product(gradient_of(parameter).view(len(rows.weight), -1), *change, alpha=-1)


def _add_product(
    gradient: torch.Tensor, left: torch.Tensor, right: torch.Tensor, alpha: float = 1
) -> None:
    """Add a product of matrices to a gradient, which may be summed in float32."""
    if gradient.dtype == left.dtype:
        gradient.addmm_(left, right, alpha=alpha)
    else:
        gradient.add_(left @ right, alpha=alpha)


def stacked(statistics: Statistics) -> torch.Tensor:
    """The statistics as one tensor [numbers, n], for the exchange."""
    return torch.stack([numbers for numbers in statistics if numbers is not None])


def combined(parts: torch.Tensor) -> Statistics:
    """The statistics of all columns, from those of each rank [ranks, numbers, n]."""
    largest = parts[:, 0].amax(0)
    total = (parts[:, 1] * torch.exp(parts[:, 0] - largest)).sum(0)
    return Statistics(largest, total, *parts[:, 2:].sum(0))


def undivided(statistics: Statistics) -> Statistics:
    """The statistics for powers that are not divided by their sum."""
    return statistics._replace(total=torch.ones_like(statistics.total))


def log_powers(whole: Statistics) -> torch.Tensor:
    """log P of each row's label."""
    return whole.label - whole.largest - whole.total.log()


def loss(head: Head, classes: int, labels: Labels, whole: Statistics) -> torch.Tensor:
    """The loss of a micro-batch, a scalar; with context ranks, this rank's summand."""
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
    head: Head, classes: int, labels: Labels, part: Statistics, whole: Statistics, share: float
) -> Factors:
    """The gradient of `share` times the loss with respect to a rank's logits; its statistics are
    `part`.

    Rows that do not count get none, even if no row counts and the loss is NaN, as in eager mode.
    """
    epsilon = head.label_smoothing
    each = share * head.scale / _divisor(head, labels, whole)
    weight = torch.ones_like(whole.total) if whole.weight is None else whole.weight
    label = torch.where(labels.counted, each * weight * (1 - epsilon), 0)
    powers, everyone = label, None
    if epsilon and whole.mass is not None:
        everyone = torch.where(labels.counted, each * epsilon / classes, 0)
        powers = label + everyone * whole.mass
    ratio = part.total * torch.exp(part.largest - whole.largest) / whole.total
    at_label = torch.where(labels.owned, powers * log_powers(whole).exp() - label, 0)
    return Factors(powers * ratio, at_label, everyone)


def _divisor(head: Head, labels: Labels, whole: Statistics) -> torch.Tensor:
    """The divisor of the sum over rows."""
    if head.reduction != "mean":
        return whole.total.new_ones(())
    if labels.number is not None:
        return labels.number.to(whole.total.dtype)
    weight = torch.ones_like(whole.total) if whole.weight is None else whole.weight
    return torch.where(labels.counted, weight, 0).sum()
