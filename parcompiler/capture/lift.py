"""The same graph, and the same model, in another floating precision.

Most models cast to float32 inside (norms, softmax, loss) also when their parameters are double,
which limits how exactly two runs can agree. `lift` rewrites a captured graph so that every
floating tensor has the given dtype; `lifting` does the same to a model that runs eagerly. They
share no code on purpose: the second is the reference for the first. (There is no lifting to 16
bits: the model's own casts can only be told apart while it is captured, see `narrow`.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from parcompiler.capture.effects import arguments_of
from parcompiler.capture.patches import patched
from parcompiler.capture.rewriting import copied, inserted
from parcompiler.graph import Graph, is_floating, tensors_of
from parcompiler.temporary import default_dtype


def lift(graph: Graph, dtype: torch.dtype) -> Graph:
    """`graph` with every floating tensor and every floating cast in `dtype`; a new graph, made once
    for all meshes and verifications."""
    return graph.once(("lifted", dtype), lambda: _lift(graph, dtype))


def _lift(graph: Graph, dtype: torch.dtype) -> Graph:
    """Uncached body of `lift`."""
    lifted = copied(graph)
    swap = _swap(dtype)

    def converted(tensor: torch.Tensor) -> torch.Tensor:  # for recorded tensors, without data
        kind = _in(dtype, tensor.dtype)
        if tensor.dtype == kind:
            return tensor
        if tensor.layout != torch.strided:  # a sparse matrix has no strides
            return tensor.to(kind)
        return tensor.new_empty_strided(tensor.shape, tensor.stride(), dtype=kind)

    for node in list(lifted.made.nodes):
        node.args = pytree.tree_map(swap, node.args)
        node.kwargs = pytree.tree_map(swap, node.kwargs)
        value = node.meta.get("val")
        node.meta["val"] = pytree.tree_map_only(torch.Tensor, converted, value)
        if _follows_default(node):
            _settle(node, dtype)
        contexts = node.meta.get("contexts", ())
        node.meta["contexts"] = tuple(c for c in contexts if c[0] != "autocast")
    return lifted.rewritten(
        parameters=tuple(
            replace(item, dtype=_in(dtype, item.dtype), has_master=False)
            for item in graph.parameters
        ),
        inputs=tuple(replace(item, dtype=_in(dtype, item.dtype)) for item in graph.inputs),
        narrow=None,
    )


def _in(dtype: torch.dtype, kind: torch.dtype) -> torch.dtype:
    """The dtype in place of a floating or complex one, in the precision of `dtype`; others stay."""
    if kind.is_complex:
        return dtype.to_complex()
    return dtype if kind.is_floating_point else kind


def _swap(dtype: torch.dtype) -> Callable[[Any], Any]:
    """A function that converts floating dtypes to the precision of `dtype`, and returns others
    unchanged."""
    return lambda leaf: _in(dtype, leaf) if isinstance(leaf, torch.dtype) else leaf


def settle_default(graph: fx.Graph) -> None:
    """Write torch's default dtype into the nodes that follow it, unless it is float32: ranks have
    that."""
    if (dtype := torch.get_default_dtype()) == torch.float32:
        return
    for node in list(graph.nodes):
        if _follows_default(node):
            two_numbers = node.target == torch.ops.aten.where.Scalar
            (_with_tensor if two_numbers else _settle)(node, dtype)


def _follows_default(node: fx.Node) -> bool:
    """Whether a node makes a floating tensor in torch's default dtype: from nothing or integers."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    operands = [operand.meta.get("val") for operand in node.all_input_nodes]
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    has_dtype = any(isinstance(leaf, torch.dtype) for leaf in leaves)
    made, read = (any(map(is_floating, tensors_of(x))) for x in (node.meta["val"], operands))
    return not has_dtype and made and not read


def _settle(node: fx.Node, dtype: torch.dtype) -> None:
    """Make the dtype of a node that uses torch's default explicit: by its argument, or by a
    cast."""
    assert isinstance(node.target, torch._ops.OpOverload)
    if any(argument.name == "dtype" for argument in node.target._schema.arguments):
        node.kwargs = {**node.kwargs, "dtype": dtype}
        return
    # Arithmetic converts all operands to floats except conditions (`where`).
    choosing = [v for k, v in arguments_of(node).items() if k in ("condition", "mask")]
    inputs = [operand for operand in node.all_input_nodes if operand not in choosing]
    operands = [x for x in inputs if isinstance(x.meta.get("val"), torch.Tensor)]
    for operand in operands:
        cast = inserted(node, torch.ops.aten.to.dtype, operand, dtype)
        node.replace_input_with(operand, cast)
    if not operands:  # `where` with two numbers
        with node.graph.inserting_after(node):
            after = node.graph.call_function(torch.ops.aten.to.dtype, (node, dtype))
        after.meta = dict(node.meta)
        node.meta["val"] = node.meta["val"].to(torch.float32)  # which ranks have as the default
        node.replace_all_uses_with(after, delete_user_cb=lambda user: user is not after)


def _with_tensor(node: fx.Node, dtype: torch.dtype) -> None:
    """Make the first of the two numbers of a `where` a tensor: a cast of the result would keep the
    rounding of float32."""
    condition, first, second = node.args
    to = {"dtype": dtype, "device": node.meta["val"].device}
    with node.graph.inserting_before(node):
        made = node.graph.create_node(
            "call_function", torch.ops.aten.scalar_tensor.default, (first,), to, "number"
        )
    made.meta = {**node.meta, "val": node.meta["val"].new_empty((), dtype=dtype)}
    node.target, node.args = torch.ops.aten.where.ScalarOther, (condition, made, second)


_CASTS = {"float", "half", "bfloat16", "double"}
_COMPLEX_CASTS = {"cfloat", "chalf", "cdouble"}
_CONSTANTS = {"tensor", "as_tensor", "asarray"}
_GROUPED = {"grouped_mm", "_grouped_mm"}
_DTYPE: Any = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]


class _Lifting(TorchFunctionMode):
    """Replaces floating dtypes in every call of a torch function."""

    def __init__(self, dtype: torch.dtype, model_dtype: torch.dtype, default: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.model_dtype = model_dtype
        self.default = default

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` with floating dtypes swapped; `x.float()` becomes a cast to `dtype`."""
        if func == _DTYPE:  # models read their own precision, for `eps` say
            kind = func(*args)
            return self.model_dtype if kind == self.dtype else kind
        name = getattr(func, "__name__", "")
        if name in _CASTS or name in _COMPLEX_CASTS:
            return args[0].to(self.dtype if name in _CASTS else self.dtype.to_complex())
        if name in _CONSTANTS and not isinstance(next(iter(args), None), torch.Tensor):
            return self._constant(func, args, kwargs or {})
        if name in _GROUPED and self.dtype == torch.float64:
            return _grouped(*args, **(kwargs or {}))
        swap = _swap(self.dtype)
        return func(*pytree.tree_map(swap, args), **pytree.tree_map(swap, kwargs or {}))

    def _constant(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """A constant rounded to the dtype that the model gives it, as in a captured graph."""
        with default_dtype(self.default):
            made: torch.Tensor = func(*args, **kwargs)
        return made.to(_in(self.dtype, made.dtype))


def _grouped(
    rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor | None = None, **more: object
) -> torch.Tensor:
    """`grouped_mm`, which has no float64 kernel: the rows [t, k] of each expert, which end at its
    `offs`, times the expert's matrix in `weight` [experts, k, n]."""
    if (
        offs is None
        or (rows.dim(), weight.dim()) != (2, 3)
        or any(v is not None for v in more.values())
    ):
        message = "grouped_mm in float64 of other than rows by experts"
        raise NotImplementedError(message)
    ends = offs.tolist()
    pairs = zip([0, *ends], ends, weight, strict=False)
    return torch.cat([rows[start:end] @ matrix for start, end, matrix in pairs])


@contextmanager
def lifting(dtype: torch.dtype, model_dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """In this context, eager code of a model in `model_dtype` computes in `dtype`, whatever it
    casts to.

    Limits (`torch.finfo`) stay those of `model_dtype`, and constants keep the rounding of the dtype
    that the model gives them, or else of torch's default, as in a captured graph.
    """
    finfo = torch.finfo

    def limits(kind: torch.dtype | None = None) -> torch.finfo:
        return finfo(model_dtype if kind in (None, dtype) else kind)

    mode = _Lifting(dtype, model_dtype, torch.get_default_dtype())
    with default_dtype(dtype), patched(torch, finfo=limits), mode:
        yield


def lifted(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.dtype]:
    """A function from a parameter or buffer to its dtype in a model lifted to `dtype`."""
    return lambda tensor: _in(dtype, tensor.dtype)
