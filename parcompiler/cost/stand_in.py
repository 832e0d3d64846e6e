"""Tensors without data that stand in for recorded values.

A stand-in reports the device CPU, so that autograd, autocast and the choice of an attention kernel
treat it as an ordinary tensor; below them, each operator runs on the meta tensor inside. This is
how `FakeTensorMode` works, but without its bookkeeping: several times faster on new sizes, and a
layer is traced once. The few operators that depend on the device below autograd (the statistics
that norms keep in bfloat16, the tensors that a bag of embeddings keeps) act as on an accelerator.

>>> x = stand_in(torch.empty(2, 3, device="meta"))
>>> (x @ x.T).shape, x.device
(torch.Size([2, 2]), device(type='cpu'))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import map_aggregate

from parcompiler.cost.known_results import result
from parcompiler.graph import is_floating, tensors_of

CPU, META = torch.device("cpu"), torch.device("meta")


class StandIn(torch.Tensor):
    """A tensor that claims to be on the CPU; `meta` has its shape, strides, dtype and storage."""

    meta: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, meta: torch.Tensor) -> StandIn:
        assert meta.is_meta, "a stand-in holds a tensor of the meta device"
        made: StandIn = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=CPU,
        )
        made.meta = meta
        return made

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory that it would occupy; views share it."""
        return self.meta.untyped_storage()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return run(func, args, kwargs or {})


def run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operator below autograd, as stand-ins; operands changed in place stay the
    same stand-ins.

    Raises RuntimeError (or what the operator raises) for one that cannot run without data.
    """
    if torch.Tag.inplace_view in getattr(func, "tags", ()):
        message = f"{func} changes the shape of its argument"
        raise NotImplementedError(message)
    outer = [item for item in (*args, *kwargs.values()) if isinstance(item, StandIn)]
    known = {id(item.meta): item for item in outer}
    inner = {name: _inside(item) for name, item in kwargs.items()}
    return _outside(result(func, _inside(args), inner), known)


def stand_in(value: Any) -> Any:
    """Fresh stand-ins of the same shape, strides and dtype, in the same structure.

    Symbolic sizes become the numbers of the example; a size that depends on the data becomes its
    upper bound, or 1 where there is none.
    """
    return map_aggregate(value, _fresh)


def source(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """A stand-in for `value` that carries gradients, and the leaves that receive them."""
    leaves: list[torch.Tensor] = []

    def make(item: Any) -> Any:
        leaf = _fresh(item)
        if not is_floating(leaf):
            return leaf
        leaves.append(leaf.requires_grad_())
        return _Source.apply(leaf)  # type: ignore[no-untyped-call]

    return map_aggregate(value, make), leaves


def storages(value: Any) -> set[torch.UntypedStorage]:
    """The memory that the tensors in nested values would occupy; views share it."""
    return {tensor.untyped_storage() for tensor in tensors_of(value)}


class _Source(torch.autograd.Function):
    """The result of another block: it has a gradient, and in-place operators may change it.

    Autograd refuses to change leaves in place, so that a leaf cannot stand in for it.
    """

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        fresh: torch.Tensor = _fresh(leaf)
        return fresh

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _fresh(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        shape = [_size(size) for size in value.shape]
        stride = [_size(size) for size in value.stride()]
        made = torch.empty_strided(shape, stride, dtype=value.dtype, device=META)
        return made if isinstance(made, StandIn) else StandIn(made)  # a recorder makes stand-ins
    return _size(value) if isinstance(value, torch.SymInt) else value


def _inside(value: Any) -> Any:
    """Meta tensors for stand-ins, and for constants of an operator."""
    if isinstance(value, StandIn):
        return value.meta
    if isinstance(value, torch.Tensor):
        return value.to(META)
    if isinstance(value, list | tuple):
        return type(value)([_inside(item) for item in value])
    return META if isinstance(value, torch.device) else value


def _outside(value: Any, known: Mapping[int, StandIn]) -> Any:
    """Stand-ins for meta tensors, the `known` ones by their identity."""
    if isinstance(value, torch.Tensor):
        changed = known.get(id(value))
        return StandIn(value.to(META)) if changed is None else changed
    if isinstance(value, list | tuple):
        return type(value)([_outside(item, known) for item in value])
    return value


def _size(size: int | torch.SymInt) -> int:
    if isinstance(size, int):
        return size
    from torch.fx.experimental.symbolic_shapes import optimization_hint  # with sympy, 0.4 s

    upper = size.node.shape_env.bound_sympy(size.node.expr).upper
    bounded = upper.is_Integer and upper < 1 << 40
    return int(optimization_hint(size, fallback=int(upper) if bounded else 1))
