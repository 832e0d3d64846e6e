"""A cache of the results of operators on tensors without data, by the form of their operands.

torch computes the shape of a result in Python, in a tenth of a millisecond per operator. The
layers of a model, its granularities and its precisions repeat the same calls many times.

>>> x = torch.empty(2, 3, device="meta")
>>> once, again = (result(torch.ops.aten.add.Tensor, (x, 1.0), {}) for _ in range(2))
>>> again.shape, again.untyped_storage() is once.untyped_storage()
(torch.Size([2, 3]), False)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cache
from typing import Any

import torch

from parcompiler.graph import tensors_of

MOST = 1 << 15  # most cached results: some megabytes
Form = tuple[torch.Size, tuple[int, ...], torch.dtype]  # shape, strides and dtype of a tensor

_PLAIN = (
    int, float, bool, str, type(None),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_known: dict[Hashable, Any] = {}  # forms of results


def result(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operator on meta tensors. Raises what the operator raises."""
    key = _key(func, args, kwargs) if _makes_anew(func) else None
    if key is not None and key in _known:
        return _made(_known[key])
    value = func(*args, **kwargs)
    if key is not None and _is_new(value, (args, list(kwargs.values()))):
        if len(_known) >= MOST:
            _known.clear()
        _known[key] = _forms(value)
    return value


@cache
def _makes_anew(func: Callable[..., Any]) -> bool:
    """Whether `func` is an operator of torch that, by its schema, neither changes nor returns an
    operand."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    schema = func._schema
    aliases = any(item.alias_info for item in (*schema.arguments, *schema.returns))
    return not (aliases or schema.is_mutable)


def _key(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Hashable | None:
    """The cache key: all that the forms of results depend on; None where an operand has no form."""
    try:
        forms = tuple(_form(item) for item in (*args, *kwargs.values()))
    except TypeError:
        return None
    return func, forms, tuple(kwargs), torch.get_default_dtype()


def _form(value: Any) -> Hashable:
    """The form of a tensor, or a number with its type (1, 1.0 and True are one key).

    Raises TypeError for anything else: a complex tensor may be a lazy conjugate.
    """
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_complex():
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_form, value))
    if isinstance(value, _PLAIN):
        return type(value), value
    message = f"a {type(value).__name__} has no form"
    raise TypeError(message)


def _is_new(value: Any, operands: Any) -> bool:
    """Whether a result consists of tensors, or None, each of which fills memory of its own."""
    items = value if isinstance(value, tuple) else [value]
    tensors = [item for item in items if item is not None]
    if not all(isinstance(item, torch.Tensor) and _fills(item) for item in tensors):
        return False
    read = _memory(tensors_of(operands))
    return len(_memory(tensors)) == len(tensors) and read.isdisjoint(_memory(tensors))


def _fills(tensor: torch.Tensor) -> bool:
    """Whether `_made` would make an equal tensor from its form."""
    if not tensor.is_meta or tensor.layout != torch.strided or tensor.is_complex():
        return False
    size = _made(_forms(tensor)).untyped_storage().nbytes()
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == size


def _memory(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _forms(value: Any) -> Form | list[Form | None] | None:
    """The forms of one result, or of a tuple of them."""
    return list(map(_layout, value)) if isinstance(value, tuple) else _layout(value)


def _layout(tensor: torch.Tensor | None) -> Form | None:
    """The form of a result, if there is one."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)


def _made(forms: Any) -> Any:
    """New results with these forms."""
    if isinstance(forms, list):
        return tuple(map(_made, forms))
    if forms is None:
        return None
    shape, stride, dtype = forms
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
