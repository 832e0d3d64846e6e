"""The share of its arithmetic that a device reaches in a matrix product: tiles, waves, and fills.

    n ┌────┬────┬──┐   [1] a multiprocessor computes a tile of the result; tiles at the edge are
      │ 0  │ 1  │2 │       computed whole
    m ├────┼────┼──┤   [2] as many tiles at once as multiprocessors: the last wave is not full
      │ 3  │ 4  │5 │   [3] before a tile's first product its operands come from memory
      └────┴────┴──┘   [4] small tiles read more for each product than caches give

The tiles are the most frequent of cuBLAS; the quantization of [1] and [2] and the order of [4] are
those of NVIDIA's "Matrix Multiplication Background User's Guide". Where a result has few tiles,
parts of the sum over k are tiles of their own, which are added afterwards ("split-k"). Convolutions
are such products too ("Convolutional Layers User's Guide": implicit GEMM).

>>> reached([(1, 8192, 8192, 8192)], 108, 2.9e12)  # 2048 tiles in 19 waves of 108
0.995362...
>>> reached([(1, 3072, 3072, 2048)], 108, 2.9e12)  # 288 tiles of 256 by 128 in 3 waves
0.87938...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

Product = tuple[int, int, int, int]  # (batch, m, n, k): `batch` results [m, n], each a sum over k

TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
WHOLE = 64.0  # products per operand read from which on a tile (128 by 128) never waits for reads
FILL = 0.5e-6  # seconds until the first operands of a tile arrive: one read of memory of about 500
# cycles, an estimate from the latencies that microbenchmarks of such devices find
SPLITS = (1, 2, 4, 8, 16, 32)


def reached(products: Sequence[Product], multiprocessors: int, peak: float) -> float:
    """The fraction of the peak for some products of equal FLOPs, one after another.

    `peak` is that of one multiprocessor, in FLOP/s.
    """
    return len(products) / sum(1 / _best(item, multiprocessors, peak) for item in products)


@lru_cache(maxsize=4096)
def _best(product: Product, multiprocessors: int, peak: float) -> float:
    """The fraction for the best tile and the best number of parts of the sum."""
    return max(_fractions(product, multiprocessors, peak))


def _fractions(product: Product, multiprocessors: int, peak: float) -> Iterator[float]:
    batch, m, n, k = (max(1, size) for size in product)
    for rows, columns in TILES:
        down, across = -(-m // rows), -(-n // columns)
        filled = (m * n) / (down * rows * across * columns)
        fast = min(1.0, rows * columns / (rows + columns) / WHOLE)
        for parts in SPLITS:
            tiles = batch * down * across * parts
            if parts > 1 and (tiles > 2 * multiprocessors or k < 512 * parts):
                break
            waves = -(-tiles // multiprocessors)
            fill = FILL * peak / (2 * rows * columns) * parts
            yield filled * fast * tiles / (waves * multiprocessors) * k / (k + fill)


def products_of(name: str, args: Sequence[Any], result: torch.Tensor) -> tuple[Product, ...]:
    """The products of an operator, named without overload as in "aten::mm"; empty for others."""
    if name in _OPERANDS:
        left, right = args[_OPERANDS[name] :][:2]
        batch = left.shape[0] if left.dim() == 3 else 1
        return (_whole(batch, left.shape[-2], right.shape[-1], left.shape[-1]),)
    if name == "aten::convolution":
        image, weight, groups = args[0], args[1], args[8]
        forward, _, _ = _convolution(image, weight, result, groups)
        return () if image.shape[1] == groups else (forward,)
    if name == "aten::convolution_backward":
        gradient, image, weight, groups, wanted = *args[:3], args[9], args[10]
        _, *backward = _convolution(image, weight, gradient, groups)
        kept = [item for item, wants in zip(backward, wanted, strict=False) if wants]
        return () if image.shape[1] == groups else tuple(kept)
    return ()


_OPERANDS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}


def _convolution(
    image: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, groups: int
) -> tuple[Product, Product, Product]:
    """The products for the result, for the gradient of the image, and for that of the weight."""
    window = weight.shape[2:].numel()
    read, made = image.shape[1] // groups, result.shape[1] // groups
    pixels, results = image.numel() // image.shape[1], result.numel() // result.shape[1]
    return (
        _whole(groups, results, made, read * window),
        _whole(groups, pixels, read, made * window),
        _whole(groups, made, read * window, results),
    )


def _whole(*sizes: Any) -> Product:
    batch, m, n, k = map(int, sizes)
    return batch, m, n, k
