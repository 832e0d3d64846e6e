"""The workloads that are timed, in many sizes: products, attention, convolutions, copies and
others.

A ladder is measured from its smallest size on, until one would take too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from parcompiler.calibrate.work import Shape, Workload

aten = torch.ops.aten

LONE, LAYER, COPY = "launch of one", "launch of a layer", "copy"

WIDTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
CHANNELS = (8, 16, 32, 64, 128, 256, 512)
ROWS = (8, 128, 2048, 32768)  # of 512 elements
COPIES = tuple(4**n for n in range(6, 15))  # elements of 4 bytes: 16 KiB to 1 GiB
ROW = 512


Ladder = tuple[Workload, ...]  # in growing sizes


def ladders(dtypes: Sequence[torch.dtype], most: int | None = None) -> Iterator[Ladder]:
    """All workloads to measure on one device; at most the `most` smallest sizes of each."""
    single = torch.float32
    yield (Workload(LONE, "other", single, ((1,), (1,)), torch.add),)
    yield (Workload(LAYER, "other", single, _layer_shapes(8, 16), _layer, gradients=True),)
    yield tuple(
        Workload(COPY, COPY, single, ((n,), (n,)), torch.Tensor.copy_) for n in COPIES[:most]
    )
    for dtype in dtypes:
        products = [((n, n),) * 4 for n in WIDTHS]
        attention = [((1, 8, n, 64),) * 3 for n in LENGTHS]
        images = [((4, n, 28, 28), (n, n, 3, 3)) for n in CHANNELS]
        kinds: list[tuple[str, Sequence[tuple[Shape, ...]], Callable[..., Any], bool]] = [
            ("matmul", products, _products, False),
            ("attention", attention, _attention, True),
            ("convolution", images, _convolution, True),
        ]
        for kind, (operands, run) in _OPERATORS.items():
            kinds.append((kind, [((n, ROW),) * operands for n in ROWS], run, False))
        for kind, shapes, run, gradients in kinds:
            yield tuple(
                Workload(kind, kind, dtype, shape, run, gradients) for shape in shapes[:most]
            )


def _products(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, gradient: torch.Tensor
) -> None:
    """The three products of a linear layer: forward, and the gradients of input and weight."""
    torch.mm(x, weight.T)
    torch.mm(gradient, weight)
    torch.mm(gradient.T, y)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _convolution(image: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.conv2d(image, weight, padding=1)


def _norm_backward(gradient: torch.Tensor, x: torch.Tensor) -> None:
    weight = x[0]
    # the dtype of a norm's statistics depends on the device: found with a short one
    (_, mean, _) = aten.native_layer_norm(x[:1], [ROW], weight, weight, 1e-5)
    rows = x[:, :1].to(mean.dtype).contiguous()
    aten.native_layer_norm_backward(
        gradient, x, [ROW], rows, rows, weight, weight, [True, True, True]
    )


# The operators between the products of a model, called below autograd under the names in the cost
# model, each with its number of operands.
_OPERATORS: dict[str, tuple[int, Callable[..., Any]]] = {
    "aten.add.Tensor": (2, torch.add),
    "aten.mul.Tensor": (2, torch.mul),
    "aten.gelu.default": (1, aten.gelu),
    "aten.gelu_backward.default": (2, aten.gelu_backward),
    "aten.silu.default": (1, aten.silu),
    "aten.silu_backward.default": (2, aten.silu_backward),
    "aten._softmax.default": (1, lambda x: aten._softmax(x, -1, False)),
    "aten._softmax_backward_data.default": (
        2,
        lambda g, y: aten._softmax_backward_data(g, y, -1, y.dtype),
    ),
    "aten._log_softmax.default": (1, lambda x: aten._log_softmax(x, -1, False)),
    "aten._log_softmax_backward_data.default": (
        2,
        lambda g, y: aten._log_softmax_backward_data(g, y, -1, y.dtype),
    ),
    "aten.native_layer_norm.default": (
        1,
        lambda x: aten.native_layer_norm(x, [ROW], x[0], x[0], 1e-5),
    ),
    "aten.native_layer_norm_backward.default": (2, _norm_backward),
    "aten.native_dropout.default": (1, lambda x: aten.native_dropout(x, 0.1, True)),
}


def _layer_shapes(length: int, width: int) -> tuple[Shape, ...]:
    weights = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    return ((1, length, width), (width,), *weights)


def _layer(x: torch.Tensor, scale: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """A layer so small that its time is that of calling its kernels."""
    into, out, up, down = weights
    width = x.shape[-1]
    heads = (*x.shape[:-1], 2, width // 2)
    y = F.layer_norm(x, (width,), scale, scale)
    query, key, value = (
        part.view(heads).transpose(1, 2) for part in F.linear(y, into).chunk(3, -1)
    )
    mixed = _attention(query, key, value).transpose(1, 2).reshape(x.shape)
    x = x + F.linear(mixed, out)
    hidden = F.gelu(F.linear(F.layer_norm(x, (width,), scale, scale), up))
    return x + F.linear(hidden, down)
