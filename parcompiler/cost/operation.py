"""One operator below autograd: its kind, its FLOPs and the bytes that it moves.

FLOPs are those of torch.utils.flop_counter, except for operators for which it has no formula, or a
wrong one. A multiplication with its addition counts 2, as there. Attention counts all scores, with
those that a causal mask discards, as is usual in comparisons of models; its time counts only the
scores that remain (`done`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_flop_count

from parcompiler.capture.effects import bound
from parcompiler.cost.tiles import Product, products_of
from parcompiler.graph import is_floating, tensors_of

EXCHANGE = "exchange"  # the kind of collectives of tensor ranks


@dataclass(frozen=True, slots=True)
class Operation:
    """One kernel: `flops` counts a multiplication with its addition as 2, `nbytes` is its traffic.

    `kind` is "matmul", "attention", "convolution" or "other"; an operator without a formula counts
    one FLOP per element of its result. `dtype` is that of its arithmetic. For a collective
    `nbytes` are those that each of its `ranks` sends; without their number it is a message.
    `beside` are operations, also listed by themselves, that run at the same time. `products` are
    the matrix products of a "matmul" or a "convolution", where they are known. The numbers of a
    collective's ranks, along `axis`, differ by `apart`. `place` is the number of the node of a
    block to which it belongs, in the forward or in the backward. `done` is the share of the FLOPs
    that the kernel does: causal attention skips masked scores.
    """

    name: str
    kind: str
    flops: float
    nbytes: float
    dtype: torch.dtype
    ranks: int = 0
    beside: tuple[Operation, ...] = ()
    products: tuple[Product, ...] = ()
    apart: int = 1
    axis: str = "tensor"
    place: int | None = field(default=None, compare=False, repr=False)
    done: float = 1.0

    @property
    def computed(self) -> float:
        """The FLOPs that the kernel does."""
        return self.done * self.flops


# These allocate or rename memory, or query it: they move nothing.
FREE = frozenset(
    {
        "aten::_unsafe_view",
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::resize_",
        "aten::set_",
    }
)

# These write their first argument without reading it.
WRITERS = frozenset(
    f"aten::{name}"
    for name in ("bernoulli_", "copy_", "exponential_", "fill_", "normal_", "random_", "uniform_")
) | {"aten::zero_"}

# These read no more of their first argument (a table) than the size of their result.
READERS = frozenset(f"aten::{name}" for name in ("embedding", "gather", "index", "index_select"))

# These change, in place, no more of their first argument (a table) than the size of the others.
UPDATERS = frozenset(
    f"aten::{name}"
    for name in (
        "_index_put_impl_",
        "index_add_",
        "index_copy_",
        "index_put_",
        "scatter_",
        "scatter_add_",
        "scatter_reduce_",
    )
)

BAG = "aten::_embedding_bag"

# These need statistics over all rows before the first result: operands that exceed caches are read
# twice, by the backward too (as in Jung et al. 2018, arXiv 1807.01702).
TWICE_READ = {
    **dict.fromkeys(("aten::native_batch_norm", "aten::_native_batch_norm_legit"), 1),
    **dict.fromkeys(("aten::cudnn_batch_norm", "aten::_batch_norm_with_update"), 1),
    **dict.fromkeys(("aten::native_batch_norm_backward", "aten::batch_norm_backward"), 2),
    "aten::cudnn_batch_norm_backward": 2,
}


def describe(
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: Any,
    *,
    by_formula: bool = True,
) -> Operation | None:
    """The cost of calling `target`, or None when it costs nothing (views, metadata).

    `by_formula=False` counts elements also where there is a formula.
    """
    # Without its overload, as in "aten::mm".
    name = target._schema.name if isinstance(target, torch._ops.OpOverload) else label(target)
    produced = list(tensors_of(result))
    is_view = isinstance(target, torch._ops.OpOverload) and (
        target.is_view or torch.Tag.inplace_view in target.tags
    )
    if not produced or name in FREE or is_view:
        return None
    consumed = list(tensors_of((args, kwargs)))
    packet = getattr(target, "overloadpacket", target)
    compute = FORMULAS.get(name) or flop_registry.get(packet) if by_formula else None
    if compute is None:
        kind, flops = "other", float(sum(tensor.numel() for tensor in produced))
    else:
        kind = "convolution" if "conv" in name else "matmul"
        kind = "attention" if "attention" in name else kind
        real_products = 4 if any(tensor.is_complex() for tensor in produced) else 1
        flops = float(real_products * compute(*args, **kwargs, out_val=result))
    # The dtype of the first floating input, else of the first output; for complex ones of parts.
    floating = (tensor.dtype for tensor in consumed if is_floating(tensor))
    dtype = next(floating, produced[0].dtype)
    return Operation(
        name=label(target),
        kind=kind,
        flops=flops,
        nbytes=float(_bytes_moved(name, consumed, produced)),
        dtype=dtype.to_real() if dtype.is_complex else dtype,
        products=products_of(name, args, produced[0]) if compute is not None else (),
        done=_unmasked_share(target, args, kwargs) if kind == "attention" else 1.0,
    )


def nbytes(tensor: torch.Tensor) -> int:
    """The bytes of memory behind a tensor: an expanded one has fewer than its elements."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def label(target: Any) -> str:
    """The operator in full, as in "aten.mm.default", or the name of a plain function."""
    if isinstance(target, torch._ops.OperatorBase):
        return str(target)
    return str(getattr(target, "__qualname__", type(target).__name__))


def _bytes_moved(name: str, consumed: list[torch.Tensor], produced: list[torch.Tensor]) -> int:
    """Bytes of inputs that are read and of outputs that are written; of tables only used rows."""
    written = sum(map(nbytes, produced))
    if name in UPDATERS:
        return 2 * sum(map(nbytes, consumed[1:]))
    read = sum(map(nbytes, consumed))
    read += sum(map(nbytes, consumed[: TWICE_READ.get(name, 0)]))
    if name in WRITERS:
        return read - nbytes(consumed[0]) + written
    if name in READERS:
        return read - max(0, nbytes(consumed[0]) - written) + written
    if name == BAG:
        table, indices = consumed[:2]
        rows = indices.numel() * table.shape[1] * table.itemsize
        return read - max(0, nbytes(table) - rows) + written
    return read + written


Formula = Callable[..., float]


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> float:
    return float(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(
    _gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> float:
    """FLOPs of five products of the forward's two sizes: the scores again, and four gradients."""
    rows = query.numel() // query.shape[-1] * key.shape[-2]
    return 2.0 * rows * (3 * query.shape[-1] + 2 * value.shape[-1])


def _unmasked_share(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """The share of the scores that a causal mask, which starts at the first row and key, keeps."""
    if not isinstance(target, torch._ops.OpOverload):
        return 1.0
    operands = bound(target, args, kwargs)
    if not operands.get("is_causal"):
        return 1.0
    rows, keys = (int(operands[name].shape[-2]) for name in ("query", "key"))
    square = min(rows, keys)
    return (square * (square + 1) / 2 + (rows - square) * keys) / (rows * keys)


def _convolution_backward(
    gradient: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> float:
    """The forward's FLOPs for each requested gradient; torch's formula ignores groups."""
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, mask = rest
    shapes = list(image.shape), list(weight.shape), list(gradient.shape)
    return float(conv_flop_count(*shapes, transposed=transposed) * sum(mask[:2]))


def _matrix_vector(matrix: torch.Tensor, *_: Any) -> float:
    return 2.0 * matrix.numel()


def _grouped(rows: torch.Tensor, weights: torch.Tensor, *_: Any) -> float:
    """Each row is multiplied by the matrix of its group; either operand may stack the groups."""
    stacked = rows.dim() == 3 and weights.dim() == 2
    return 2.0 * prod(rows.shape[int(stacked) :]) * weights.shape[-1]


_FROM_TENSORS: Mapping[str, Formula] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::_scaled_dot_product_accelerator_overrideable": _attention,
    "aten::_scaled_dot_product_accelerator_overrideable_backward": _attention_backward,
    "aten::scaled_dot_product_attention": _attention,
    "aten::convolution_backward": _convolution_backward,
    "aten::dot": _matrix_vector,
    "aten::vdot": _matrix_vector,
    "aten::mv": _matrix_vector,
    "aten::addmv": lambda _, matrix, *__: _matrix_vector(matrix),
    "aten::_grouped_mm": _grouped,
    "transformers::grouped_mm_fallback": _grouped,
    "transformers::grouped_mm_fallback_backward": lambda *args: 2 * _grouped(*args),
}

# Functions from arguments and out_val=result to FLOPs, where torch has none or a wrong one. FLOPs
# follow from the positional arguments; out_val and options are left out.
FORMULAS: Mapping[str, Formula] = {
    name: lambda *args, compute=compute, **_: compute(*args)
    for name, compute in _FROM_TENSORS.items()
}
