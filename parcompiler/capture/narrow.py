"""The same model in 16 bits: `precision="bf16"` and "fp16".

A model is captured with its parameters in 16 bits, not rewritten afterwards: its own casts to
float32 (the norms of Llama) are kept, and constants that depend on its dtype (the least number of a
mask) are those of the 16 bits. Besides that, as under `torch.autocast`:

    parameters       16 bits; those of batch and instance norms stay in float32
    buffers          as they are: running statistics, and tables such as those of rotary positions
    floating inputs  16 bits
    criteria         float32 (cross_entropy, log_softmax, mse_loss, ...), and so is the loss
    complex numbers  complex64: Fourier transforms and makers of complex tensors read float32
    products         16 bits where the operands are of several precisions (linear, attention, ...)
    layer norms      weights for a float32 value are cast to float32; statistics as in torch
    everything else  as torch promotes

The same `mixed` surrounds the model in one process that programs are compared with.

>>> logits = torch.zeros(1, 4, dtype=torch.bfloat16)
>>> with mixed(torch.bfloat16):
...     torch.nn.functional.cross_entropy(logits, torch.tensor([2]))
tensor(1.3863)
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from parcompiler.capture.capture import capture
from parcompiler.capture.hooks import hooks_of
from parcompiler.capture.inputs import Batch
from parcompiler.capture.loss import PREFIX, WithLoss
from parcompiler.capture.modes import in_modes
from parcompiler.capture.patches import ModelMode
from parcompiler.errors import CaptureError
from parcompiler.graph import Graph

NARROW = (torch.bfloat16, torch.float16)
Loss = Callable[[Any], torch.Tensor]

# What torch.autocast computes in float32 because sums over classes or elements need it.
CRITERIA = frozenset(
    "cross_entropy nll_loss nll_loss_nd log_softmax mse_loss l1_loss smooth_l1_loss huber_loss "
    "binary_cross_entropy binary_cross_entropy_with_logits kl_div poisson_nll_loss "
    "gaussian_nll_loss cosine_embedding_loss hinge_embedding_loss margin_ranking_loss "
    "soft_margin_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss "
    "triplet_margin_loss triplet_margin_with_distance_loss ctc_loss cosine_similarity cdist pdist "
    "pairwise_distance".split()
)
PRODUCTS = frozenset(
    "linear bilinear matmul __matmul__ __rmatmul__ mm bmm mv addmm addmv addbmm baddbmm einsum "
    "chain_matmul tensordot conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d conv_tbc scaled_dot_product_attention multi_head_attention_forward "
    "grouped_mm _grouped_mm prelu".split()
)
# Complex numbers of twice 16 bits are not supported everywhere.
COMPLEX = frozenset(
    f"fft_{kind}{which}{dims}"
    for kind in ("", "i")
    for which in ("fft", "rfft", "hfft")
    for dims in ("", "2", "n")
) | frozenset("stft istft complex polar view_as_complex".split())
NORMS = frozenset(("layer_norm", "group_norm"))


def capture_in(
    dtype: torch.dtype,
    model: nn.Module,
    inputs: Batch,
    loss: Loss | None = None,
    outputs: Sequence[str] = (),
) -> Graph:
    """`capture` of `model` in 16 bits; the tensors of the graph are the model's own, unconverted.

    Raises what `capture` raises, and CaptureError for a model that cannot be copied.
    """
    original = WithLoss(model, loss)
    hooks = hooks_of(original)  # copies of parameters lose them
    if hooks and dtype == torch.float16:
        message = (
            f"{min(hooks)!r} has a hook, and in float16 gradients are those of a scaled loss: take "
            "precision='bf16'"
        )
        raise CaptureError(message)
    _check_norms(model, dtype)
    twin = _narrowed(original, dtype)
    with mixed(dtype):
        graph = capture(
            twin.model, narrow_batch(inputs, dtype), twin.loss, in_float32=True, outputs=outputs
        )
    named = original.named_parameters(remove_duplicate=False)
    originals = {name.removeprefix(PREFIX): parameter for name, parameter in named}
    tensors = {name: originals.get(name, tensor) for name, tensor in graph.tensors.items()}

    def recapture(other: Batch) -> Graph:
        with in_modes(model, graph.modes):
            return capture_in(dtype, model, other, loss, outputs)

    parameters = tuple(
        dataclasses.replace(item, has_master=item.trainable and item.dtype == dtype)
        for item in graph.parameters
    )
    return dataclasses.replace(
        graph, parameters=parameters, tensors=tensors, sample=inputs, narrow=dtype, hooks=hooks,
        recapture=recapture,
    )  # fmt: skip


def narrow_batch(inputs: Batch, dtype: torch.dtype) -> Any:
    """`inputs` with floating tensors in `dtype`."""
    return pytree.tree_map_only(
        torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, inputs
    )


def narrowed(model: nn.Module, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.dtype]:
    """A function from a parameter or buffer of `model` to its dtype in a 16-bit program."""
    kept = {id(p) for m in model.modules() if isinstance(m, _NormBase) for p in m.parameters()}
    cast = {id(p) for p in model.parameters() if p.is_floating_point()} - kept
    return lambda tensor: dtype if id(tensor) in cast else tensor.dtype


def _check_norms(model: nn.Module, dtype: torch.dtype) -> None:
    """Raise CaptureError for a batch norm whose precision no kernel supports."""
    for path, module in model.named_modules():
        if isinstance(module, _NormBase):
            tensors = *module.parameters(recurse=False), *module.buffers(recurse=False)
            kinds = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
            if other := sorted(map(str, kinds - {torch.float32, dtype})):
                message = (
                    f"{path!r} is a {type(module).__name__} in {other[0]}, and in {dtype} it must "
                    "be in float32: call model.float() before compile"
                )
                raise CaptureError(message)


def _narrowed(whole: WithLoss, dtype: torch.dtype) -> WithLoss:
    """A copy with parameters in `dtype` without values, and with the original buffers."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in whole.buffers()}
    kind = narrowed(whole, dtype)
    for parameter in whole.parameters():
        made = torch.empty_like(parameter.detach(), dtype=kind(parameter))
        memo[id(parameter)] = nn.Parameter(made, requires_grad=parameter.requires_grad)
    try:
        return copy.deepcopy(whole, memo)
    except Exception as error:  # copying a user's attributes may raise anything
        message = (
            f"{type(whole.model).__name__} cannot be copied, which another precision needs "
            f"({error}): leave precision out, or cast the model yourself"
        )
        raise CaptureError(message) from error


def mixed(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """In this context, functions of torch compute in the precisions of the table above."""
    return _Mixed(dtype)


class _Mixed(ModelMode):
    """Casts the operands of some functions."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` with its operands cast."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in CRITERIA or name in COMPLEX:
            args, kwargs = _cast((args, kwargs), {self.dtype}, torch.float32)
        elif name in PRODUCTS and self.dtype in _precisions((args, kwargs)):
            args, kwargs = _cast((args, kwargs), {torch.float32}, self.dtype)
        elif name in NORMS and torch.float32 in _precisions(args[:1]):
            args, kwargs = _cast((args, kwargs), {self.dtype}, torch.float32)
        return func(*args, **kwargs)


def _cast(operands: Any, kinds: set[torch.dtype], dtype: torch.dtype) -> Any:
    """The operands, with tensors of the dtypes `kinds` cast to `dtype`."""
    return pytree.tree_map_only(
        torch.Tensor, lambda x: x.to(dtype) if x.dtype in kinds else x, operands
    )


def _precisions(operands: Any) -> set[torch.dtype]:
    """The dtypes of the tensors among operands."""
    leaves = pytree.tree_leaves(operands)
    return {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)}
