"""Are two modules alike in all that their forward may depend on, but the values of tensors?

>>> differences(nn.Linear(2, 3), nn.Linear(2, 3)), differences(nn.Linear(2, 3), nn.Linear(2, 4))
(frozenset(), None)
>>> one, other = nn.Identity(), nn.Identity()
>>> one.place, other.place = 0, 1
>>> differences(one, other)
frozenset({('', 'place')})
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import nn

Attribute = tuple[str, str]  # the path of a module inside a layer, and a name in its __dict__

_PLAIN = (
    bool, int, float, complex, str, bytes, range, slice, type(None), torch.dtype, torch.device,
    torch.Size, torch.layout, torch.memory_format, enum.Enum,
)  # fmt: skip
_TENSORS = ("_parameters", "_buffers")
_SAVED = "state_dict"  # hooks that saving and loading run


def differences(a: nn.Module, b: nn.Module) -> frozenset[Attribute] | None:
    """The attributes whose plain values differ; None for modules that are not alike.

    Alike are modules of the same classes and submodules, with equal shapes and dtypes, the same
    ties, no hooks, and attributes that are the same objects or equal plain values.
    """
    ours, theirs = (list(m.named_modules(remove_duplicate=False)) for m in (a, b))
    if len(ours) != len(theirs) or ties(a) != ties(b):
        return None
    found: set[Attribute] = set()
    for (path, own), (other_path, other) in zip(ours, theirs, strict=True):
        names = None if path != other_path else _differing(own, other)
        if names is None or (path and own is other):
            return None
        found |= {(path, name) for name in names}
    return frozenset(found)


def ties(module: nn.Module) -> tuple[int, ...]:
    """For each parameter and buffer the number of the first that is the same tensor, or -1."""
    first: dict[int, int] = {}
    held = [vars(m).get(kind) for m in module.modules() for kind in _TENSORS]
    tensors = [t for items in held if isinstance(items, dict) for t in items.values()]
    return tuple(-1 if t is None else first.setdefault(id(t), i) for i, t in enumerate(tensors))


def _differing(a: nn.Module, b: nn.Module) -> set[str] | None:
    """The names of the plain attributes that differ in two modules, without their submodules."""
    ours, theirs = vars(a), vars(b)
    if type(a) is not type(b) or list(ours) != list(theirs):
        return None
    found: set[str] = set()
    for name, own in ours.items():
        other = theirs[name]
        if name in _TENSORS or name == "_modules":
            if not isinstance(own, dict) or list(own) != list(other):
                return None
            if not all(map(_alike, own.values(), other.values())):
                return None
        elif "_hooks" in name and _SAVED not in name:
            if own or other:
                return None
        elif own is not other and _SAVED not in name:
            equal = _equal(own, other)
            if equal is None:
                return None
            if not equal:
                found.add(name)
    return found


def _alike(a: Any, b: Any) -> bool:
    """Whether two tensors have the same form, or two submodules are there or not."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return form(a) == form(b)
    return (a is None) == (b is None)


def form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All that an operator may depend on besides values."""
    strided = tensor.layout == torch.strided
    place = (tensor.stride(), tensor.storage_offset()) if strided else ()
    flags = tensor.requires_grad, tensor.is_leaf, tensor.is_conj(), tensor.is_neg()
    kind = type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.is_inference()
    return (*kind, tuple(tensor.shape), *place, *flags)


def is_same(a: Any, b: Any) -> bool:
    """Whether two values are the same to whoever reads them."""
    return _equal(a, b) is True


def _equal(a: Any, b: Any) -> bool | None:
    """Whether two values are equal; None for those of which that cannot be told."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False if is_plain(a) and is_plain(b) else None
    if is_plain(a):
        return repr(a) == repr(b)
    if type(a) is partial:
        return _all_equal((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if type(a) in (list, tuple):
        return _all_equal(a, b) if len(a) == len(b) else None
    if type(a) is dict:
        return _all_equal(list(a.values()), list(b.values())) if list(a) == list(b) else None
    if type(a) in (set, frozenset) and all(map(is_plain, (*a, *b))):
        return sorted(map(repr, a)) == sorted(map(repr, b))
    return None


def _all_equal(ours: Collection[Any], theirs: Collection[Any]) -> bool | None:
    """Whether all of some pairs are equal; None where that cannot be told of one."""
    found = [_equal(a, b) for a, b in zip(ours, theirs, strict=True)]
    return None if None in found else all(found)


def is_plain(value: object) -> bool:
    """Whether a value can be told from others, and never changes."""
    return isinstance(value, _PLAIN)
