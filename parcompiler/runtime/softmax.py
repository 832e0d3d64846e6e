"""The local softmax of one rank's logits, a block of rows at a time and in place.

A matrix [n, k] of logits is the largest tensor of a step: it is allocated once, and the softmax is
computed in place. A block of rows stays in the cache of a CPU; copies in another precision, and
derivatives, take the memory of one block.

>>> logits = torch.tensor([[0.0, 1.0, 9.0]])  # the last column is no class
>>> result = Softmax(size=2).of_block(logits, torch.tensor([0]))
>>> result.largest.tolist(), round(result.powers.sum().item(), 3)
([1.0], 1.0)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

Function = Callable[[torch.Tensor], torch.Tensor]  # elementwise
ELEMENTS = {"cpu": 2**19}  # of one block
MOST_ELEMENTS = 2**27

_log = logging.getLogger(__name__)


class BlockSoftmax(NamedTuple):
    """The softmax of a block, with largest logit, sum of powers and a column's logit of each row.

    `powers` are in the precision of the products, and in their memory if they fit there. `slope` is
    the derivative of the logits by the product, [rows, k]; None where it is 1. `weighted` are the
    sums of the logits weighted by class, if needed.
    """

    powers: torch.Tensor
    largest: torch.Tensor
    total: torch.Tensor
    label: torch.Tensor
    slope: torch.Tensor | None
    weighted: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Softmax:
    """How products [n, k] become a softmax: the first `size` columns are classes.

    `function` computes logits from products, `weights` [k] are class weights. `fused` compiles the
    operations on a block into few kernels.
    """

    size: int
    function: Function | None = None
    weights: torch.Tensor | None = None
    fused: bool = False

    def blocks(self, products: torch.Tensor) -> Iterator[slice]:
        """The rows of each block."""
        n, k = products.shape
        step = max(1, ELEMENTS.get(products.device.type, MOST_ELEMENTS) // k)
        for first in range(0, n, step):
            yield slice(first, min(first + step, n))

    def largest(self, block: torch.Tensor) -> torch.Tensor:
        """The largest logit of each row; the block stays as it is."""
        values = block if self.function is None else self.function(block)
        values = values[:, : self.size].to(precision(block.dtype))
        return values.amax(1) if self.size else _least(values)

    def of_block(
        self, block: torch.Tensor, column: torch.Tensor, m: torch.Tensor | None = None
    ) -> BlockSoftmax:
        """From a block of products [rows, k] P' = exp(logits - m') / sum', times the derivative of
        the logits.

        With `m` it is exp(logits - m), undivided. `column` [rows] selects the logits to return. The
        products are overwritten.
        """
        if self.fused and m is None and self.size:
            return BlockSoftmax(*_fused(self.function)(block, column, self.size, self.weights))
        return self._of_block(block, column, m)

    def _of_block(
        self, block: torch.Tensor, column: torch.Tensor, m: torch.Tensor | None
    ) -> BlockSoftmax:
        """`of_block`, an operation at a time."""
        values, slope = _logits(self.function, block)
        label = column_of_rows(values, column)
        weighted = None if self.weights is None else _weighted(values, self.weights, self.size)
        if self.size < block.shape[1]:
            values[:, self.size :] = -torch.inf
            if slope is not None:
                slope[:, self.size :] = 0
        m, total, powers = self._powers(values, m)
        if slope is not None:
            powers.mul_(slope)
        if powers.data_ptr() != block.data_ptr():
            powers = block.copy_(powers)
        return BlockSoftmax(powers, m, total, label, slope, weighted)

    def _powers(
        self, values: torch.Tensor, m: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Largest, sum and powers of logits, in place."""
        if self.size == 0:
            m = _least(values) if m is None else m
            return m, values.new_zeros(len(values)), values.zero_()
        if m is not None:
            powers = values.sub_(m.unsqueeze(1)).exp_()
            return m, powers.sum(1), powers
        m = values.amax(1)
        powers = torch.softmax(values, 1, out=values)
        return m, powers.amax(1).reciprocal(), powers  # P' of the largest logit is 1 / sum'


def precision(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the softmax of logits is computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _logits(
    function: Function | None, block: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logits, in new memory or in that of the products, and their derivative."""
    if function is None:
        return block.to(precision(block.dtype)), None
    made: Any = torch.func.vjp(function, block)
    values, backward = made
    (slope,) = backward(torch.ones_like(values))
    return values.to(precision(block.dtype)), slope


def column_of_rows(matrix: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """One column of each row."""
    return matrix.gather(1, columns.unsqueeze(1)).squeeze(1)


def _weighted(values: torch.Tensor, weights: torch.Tensor, size: int) -> torch.Tensor:
    """The sum of each row's logits, weighted by class."""
    return values[:, :size] @ weights[:size].to(values.dtype)


def _least(values: torch.Tensor) -> torch.Tensor:
    """The largest logit of a rank without classes: the least finite number, as the difference of
    two infinite ones is a NaN."""
    return values.new_full((len(values),), torch.finfo(values.dtype).min)


def _whole_block(
    function: Function | None,
    block: torch.Tensor,
    column: torch.Tensor,
    size: int,
    weights: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """`Softmax.of_block` as expressions, for a compiler."""
    values, slope = _logits(function, block)
    label = column_of_rows(values, column)
    weighted = None if weights is None else _weighted(values, weights, size)
    classes = torch.arange(block.shape[1], device=block.device) < size
    values = torch.where(classes, values, -torch.inf)
    m = values.amax(1)
    powers = torch.exp(values - m.unsqueeze(1))
    total = powers.sum(1)
    powers = powers / total.unsqueeze(1)
    if slope is not None:
        slope = torch.where(classes, slope, 0)
        powers = powers * slope
    return powers.to(block.dtype), m, total, label, slope, weighted


class _Fused:
    """`_whole_block` compiled; after a failure of the compiler it runs as it is."""

    def __init__(self, function: Function | None) -> None:
        self._function = function
        self._call: Callable[..., Any] = torch.compile(_whole_block, dynamic=False)
        self._compiled = True

    def __call__(self, *arguments: Any) -> Any:
        """The block of `arguments`."""
        try:
            return self._call(self._function, *arguments)
        except Exception as error:  # whatever a compiler may raise
            if not self._compiled:
                raise
            _log.warning("the softmax of logits is not fused: %s", error)
            self._call, self._compiled = _whole_block, False
            return self._call(self._function, *arguments)


_fused = cache(_Fused)
