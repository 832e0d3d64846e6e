"""A batch as the user writes it (dict of keywords or tuple of positions) and its flat tensors.

>>> import torch
>>> [key for key, _ in flat({"ids": torch.zeros(2, 3), "flag": True})]
['ids', 'flag']
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from parcompiler.errors import InputError

Batch = Mapping[str, Any] | Sequence[Any] | torch.Tensor


def arguments(inputs: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword arguments of the model's forward."""
    if isinstance(inputs, Mapping):
        return (), {str(key): value for key, value in inputs.items()}
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, Sequence) and not isinstance(inputs, str | bytes):
        return tuple(inputs), {}
    message = (
        f"inputs must be a dict of keyword arguments or a tuple of positional ones, one "
        f"micro-batch of one data rank ({type(inputs).__name__} given)"
    )
    raise InputError(message)


def flat(inputs: Batch) -> list[tuple[str, Any]]:
    """Every leaf of a batch with the key that names it: `ids`, `0`, `images.1`."""
    args, kwargs = arguments(inputs)
    leaves, _ = pytree.tree_flatten_with_path(kwargs if kwargs else args)
    return [(".".join(_key(step) for step in path), leaf) for path, leaf in leaves]


def _key(step: object) -> str:
    """One step of a path into a pytree, as text."""
    for attribute in ("key", "idx", "name"):
        if hasattr(step, attribute):
            return str(getattr(step, attribute))
    return str(step)


def number_lists(inputs: Batch) -> list[str]:
    """The keys of the arguments that are lists or tuples of numbers alone, nested or not.

    >>> number_lists({"ids": [[1, 2], [3, 4]], "sizes": (), "flag": True})
    ['ids']
    """
    args, kwargs = arguments(inputs)
    named = {**{str(k): value for k, value in enumerate(args)}, **kwargs}
    listed = {key: value for key, value in named.items() if isinstance(value, list | tuple)}
    leaves = {key: pytree.tree_leaves(value) for key, value in listed.items()}
    return [
        key for key, values in leaves.items()
        if values and all(isinstance(leaf, int | float) for leaf in values)
    ]  # fmt: skip


def with_tensors(
    inputs: Batch, tensors: Mapping[str, torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `inputs`, with `tensors` in place of those at the same keys."""
    args, kwargs = arguments(inputs)
    pairs = flat(inputs)
    _, spec = pytree.tree_flatten(kwargs if kwargs else args)
    leaves = [tensors.get(key, leaf) for key, leaf in pairs]
    rebuilt = pytree.tree_unflatten(leaves, spec)
    return ((), rebuilt) if kwargs else (rebuilt, {})
