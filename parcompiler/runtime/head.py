"""The head of a model and its loss on own rows of the vocabulary, pass by pass.

    x [n, h]    W own rows [k, h]    Y = x Wᵀ + b    L = logits(Y), elementwise    d = dL/dY

    S           Y; m' = max L; sum' = Σ exp(L - m'); P' = exp(L - m') / sum'     of own columns
                vocab-2 also: A = (P' d) W
    exchange    m = max m'; sum = Σ sum' exp(m' - m)                             over ranks
    gradient    c = sum' exp(m' - m) / sum, so that P = P' c; g = d loss / d loss_i; y the label
                dx = g c A + g (P_y - 1) d_y W_y
    T           W.grad += (P' d)ᵀ (g c x), and g (P_y - 1) d_y x to row y

The algorithms are those of "Balancing Pipeline Parallelism with Vocabulary Parallelism" (arXiv
2411.05288): vocab-1 is its Algorithm 1 and vocab-2 its Algorithm 2; naive and interlaced ask for m
before they compute powers. Two things are done otherwise. The column of the label is kept out of
P': P_y - 1, small where a model is good, would be rounded to the precision of the weights with it.
And what multiplies rows of P' [n, k] multiplies those of A and x [n, h] instead, so that nothing
passes over P' again but the two products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from parcompiler.pieces import Span
from parcompiler.runtime.lookup import gradient_of, located
from parcompiler.runtime.softmax import Softmax, precision
from parcompiler.runtime.statistics import Factors, Labels, Statistics
from parcompiler.runtime.vocabulary import Head, Vocabulary


class Own(NamedTuple):
    """What a rank holds of the head, which has `classes` rows on the whole."""

    head: Head
    weight: torch.Tensor  # [k, h], zeros behind the rows of `span`
    bias: torch.Tensor | None  # [k], or [1, k] as in the model
    class_weight: torch.Tensor | None  # [k], zeros where no class is; None where all weigh 1
    softmax: Softmax
    span: Span
    classes: int


@dataclass(eq=False)
class Part:
    """What a rank holds of one micro-batch between S and T.

    `powers` [n, k] are Y at first, then P' d without the labels' columns. `slope` [n] is d of the
    labels' columns; `slopes` [n, k] are w d, kept where smoothing gives every class a gradient.
    """

    x: torch.Tensor
    labels: Labels
    powers: torch.Tensor
    largest: torch.Tensor
    own: Statistics | None = None
    slope: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    product: torch.Tensor | None = None  # A = (P' d) W


class Room:
    """Matrices [n, k] of micro-batches that are done, for those that come: new memory is slow."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, rows: int, like: torch.Tensor) -> torch.Tensor:
        """A matrix with a column for each row of `like`; its numbers do not matter."""
        shape = (rows, like.shape[0])
        if self._free and self._free[-1].shape == shape:
            return self._free.pop()
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def give(self, matrix: torch.Tensor) -> None:
        """Let the next micro-batch have a matrix."""
        self._free.append(matrix)


def own_head(vocabulary: Vocabulary, *, fused: bool = False) -> Own:
    """The head on this rank."""
    head = vocabulary.head
    assert head is not None
    weight, span = vocabulary.tensor(head.weight), vocabulary.span(head.weight)
    bias = vocabulary.tensor(head.bias) if head.bias else None
    importance = _importance(vocabulary, head, weight, span)
    logits: Callable[[torch.Tensor], torch.Tensor] | None = None
    if head.logits:
        logits = getattr(vocabulary, "logits")  # noqa: B009 (of the emitted class)
    weighed = importance if head.label_smoothing else None
    softmax = Softmax(span.size, logits, weighed, fused)
    return Own(head, weight, bias, importance, softmax, span, vocabulary.size[head.weight])


def labels_of(own: Own, targets: torch.Tensor) -> Labels:
    """Where the labels of rows [n] stand."""
    counted = targets != own.head.ignore_index
    at = located(targets, own.span, len(own.weight))
    return Labels(counted, at.owned & counted, at.rows)


@torch.no_grad()
def products(own: Own, x: torch.Tensor, labels: Labels, room: Room) -> Part:
    """Y = x Wᵀ + b of own rows: what S begins with."""
    y = room.take(len(x), own.weight)
    if own.bias is None:
        torch.mm(x, own.weight.t(), out=y)
    else:
        torch.addmm(own.bias, x, own.weight.t(), out=y)
    return Part(x, labels, y, x.new_empty(len(x), dtype=precision(y.dtype)))


@torch.no_grad()
def find_largest(own: Own, part: Part) -> None:
    """S of naive: m' of each row."""
    for rows in own.softmax.blocks(part.powers):
        part.largest[rows] = own.softmax.largest(part.powers[rows])


@torch.no_grad()
def normalize(own: Own, part: Part, m: torch.Tensor | None = None) -> None:
    """Y becomes P' d, or with the largest logits `m` of all ranks exp(L - m) d; own statistics."""
    n, dtype, columns = len(part.x), part.largest.dtype, part.labels.columns
    total, label, weighted = (part.largest.new_zeros(n) for _ in range(3))
    sloped = own.softmax.function is not None
    slopes = torch.empty_like(part.powers) if sloped and own.head.label_smoothing else None
    slope = torch.ones_like(total) if sloped else None
    for rows in own.softmax.blocks(part.powers):
        found = own.softmax.of_block(
            part.powers[rows], columns[rows], None if m is None else m[rows]
        )
        _store(part, rows, found.powers)
        part.largest[rows], total[rows], label[rows] = found.largest, found.total, found.label
        if found.weighted is not None:
            weighted[rows] = found.weighted
        if slope is not None and found.slope is not None:
            slope[rows] = _column(found.slope, columns[rows]).to(dtype)
            if slopes is not None and own.class_weight is not None:
                slopes[rows] = found.slope * own.class_weight
    part.slope, part.slopes = slope, slopes
    owned = part.labels.owned
    label = torch.where(owned, label, 0)
    more: tuple[torch.Tensor, ...] = ()
    if own.class_weight is not None:
        weight = torch.where(owned, own.class_weight[columns], 0)
        more = (weight, weighted, own.class_weight.sum().expand(n))
    part.own = Statistics(part.largest, total, label, *more)
    _keep_out(part)


@torch.no_grad()
def weigh(own: Own, part: Part) -> None:
    """A = (P' d) W of own rows [n, h]: in S of vocab-2, in T of the others."""
    part.product = torch.mm(part.powers, own.weight)


@torch.no_grad()
def input_gradient(own: Own, part: Part, factors: Factors) -> torch.Tensor:
    """Own part of the gradient of x [n, h]: g c A + g (P_y - 1) d_y W_y. A is done with."""
    assert part.product is not None
    dtype = factors.powers.dtype
    label = _at_label(part, factors)
    gradient = part.product.to(dtype).mul_(factors.powers.unsqueeze(1))
    gradient.addcmul_(label.unsqueeze(1), own.weight[part.labels.columns].to(dtype))
    if factors.everyone is not None and own.class_weight is not None:
        weighed = _weighed(own, part, own.class_weight)
        gradient.addcmul_(factors.everyone.unsqueeze(1), weighed.to(dtype), value=-1)
    part.product = None
    return gradient.to(part.x.dtype)


@torch.no_grad()
def weight_gradient(own: Own, part: Part, factors: Factors) -> None:
    """W.grad += (P' d)ᵀ (g c x), and g (P_y - 1) d_y x to the labels' rows; the bias alike."""
    label, columns = _at_label(part, factors), part.labels.columns
    if own.weight.requires_grad:
        _add_product(own.weight, part.powers, _scaled(part.x, factors.powers))
        gradient_of(own.weight).index_add_(0, columns, _scaled(part.x, label))
    if own.bias is not None and own.bias.requires_grad:
        dtype = own.bias.dtype
        gradient = gradient_of(own.bias).view(-1)
        gradient.addmv_(part.powers.t(), factors.powers.to(dtype))
        gradient.index_add_(0, columns, label.to(dtype))
    if factors.everyone is not None:
        _subtract_everyone(own, part, factors.everyone)


def _importance(
    vocabulary: Vocabulary, head: Head, weight: torch.Tensor, span: Span
) -> torch.Tensor | None:
    """w [k], where the loss asks for it."""
    if head.class_weight:
        return vocabulary.tensor(head.class_weight).detach().to(precision(weight.dtype))
    if not head.label_smoothing:
        return None
    ones = torch.zeros(len(weight), dtype=precision(weight.dtype), device=weight.device)
    ones[: span.size] = 1
    return ones


def _column(matrix: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """One column of each row."""
    return matrix.gather(1, columns.unsqueeze(1)).squeeze(1)


def _store(part: Part, rows: slice, powers: torch.Tensor) -> None:
    """Put the powers of a block where its products were, if they are not there."""
    block = part.powers[rows]
    if powers.data_ptr() == block.data_ptr():
        return
    if powers.shape == part.powers.shape:
        part.powers = powers
    else:
        block.copy_(powers)


def _keep_out(part: Part) -> None:
    """Take the labels' columns out of the powers."""
    labels, columns = part.labels, part.labels.columns.unsqueeze(1)
    others = part.powers.gather(1, columns)
    part.powers.scatter_(1, columns, others.masked_fill_(labels.owned.unsqueeze(1), 0))


def _at_label(part: Part, factors: Factors) -> torch.Tensor:
    """g (P_y - 1) d_y of each row."""
    return factors.label if part.slope is None else factors.label * part.slope


def _scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Rows times their factors, in the precision of x."""
    return (x * factor.unsqueeze(1)).to(x.dtype)


def _add_product(weight: torch.Tensor, powers: torch.Tensor, x: torch.Tensor) -> None:
    """W.grad += powersᵀ x, without a matrix in between."""
    if weight.grad is None:
        weight.grad = torch.mm(powers.t(), x)
    else:
        weight.grad.addmm_(powers.t(), x)


def _weighed(own: Own, part: Part, importance: torch.Tensor) -> torch.Tensor:
    """(w d) W [n, h], or one row where d is one."""
    if part.slopes is not None:
        return torch.mm(part.slopes, own.weight)
    return torch.mm(importance.to(own.weight.dtype).unsqueeze(0), own.weight)


def _subtract_everyone(own: Own, part: Part, everyone: torch.Tensor) -> None:
    """What smoothing gives every class, from the gradients of weight and bias."""
    assert own.class_weight is not None
    for parameter in (own.weight, own.bias):
        if parameter is None or not parameter.requires_grad:
            continue
        dtype = parameter.dtype
        x = (
            _scaled(part.x, everyone)
            if parameter is own.weight
            else everyone.to(dtype).unsqueeze(1)
        )
        if part.slopes is not None:
            change = (part.slopes.t(), x)
        else:
            change = (own.class_weight.to(dtype).unsqueeze(1), x.sum(0, keepdim=True))
        gradient_of(parameter).view(len(own.weight), -1).addmm_(*change, alpha=-1)
