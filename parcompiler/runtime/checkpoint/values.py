"""States of user objects as JSON, with their tensors beside it.

>>> tensors = {}
>>> text = encoded({"epoch": 3, "sizes": (1, 2), 7: None}, tensors)
>>> text
{'dict': [['epoch', 3], ['sizes', {'tuple': [1, 2]}], [7, None]]}
>>> decoded(text, tensors.__getitem__)
{'epoch': 3, 'sizes': (1, 2), 7: None}
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from typing import Any

import torch

from parcompiler.errors import InputError, shown
from parcompiler.runtime.axis import in_memory, raw


def encoded(value: object, tensors: dict[str, torch.Tensor], place: str = "the state") -> Any:
    """A value as JSON; its tensors go into `tensors` by a digest of their contents.

    A dictionary is kept as it is when its keys are texts and it cannot be mistaken for an encoding.
    Raises InputError for what neither JSON nor safetensors can hold, and says where it is.
    """
    match value:
        case None | bool() | int() | float() | str() if type(value) in _PLAIN:
            return value
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case torch.Tensor():
            return {"tensor": _kept(value, tensors)}
        case list():
            return [encoded(item, tensors, f"{place}[{k}]") for k, item in enumerate(value)]
        case tuple() if type(value) is tuple:
            return {"tuple": encoded([*value], tensors, place)}
        case dict():
            pairs = [
                [encoded(k, tensors, f"a key of {place}"), encoded(v, tensors, f"{place}[{k!r}]")]
                for k, v in value.items()
            ]
            if all(isinstance(key, str) for key in value) and value.keys().isdisjoint(_MARKS):
                return dict(pairs)
            return {"dict": pairs}
    message = (
        f"{place} is {shown(value)} ({type(value).__name__}), which a checkpoint cannot hold: "
        "numbers, texts, bytes, tensors, and lists, tuples and dictionaries of these"
    )
    raise InputError(message)


def decoded(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Inverse of `encoded`; `tensor` returns a tensor by its digest."""
    match value:
        case {"bytes": str(text), **rest} if not rest:
            return base64.b64decode(text)
        case {"tensor": str(name), **rest} if not rest:
            return tensor(name)
        case {"tuple": [*items], **rest} if not rest:
            return tuple(decoded(item, tensor) for item in items)
        case {"dict": [*pairs], **rest} if not rest:
            return {decoded(key, tensor): decoded(item, tensor) for key, item in pairs}
        case dict():
            return {key: decoded(item, tensor) for key, item in value.items()}
        case list():
            return [decoded(item, tensor) for item in value]
    return value


_PLAIN = (type(None), bool, int, float, str)
_MARKS = frozenset(("bytes", "tensor", "tuple", "dict"))


def _kept(tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> str:
    """Store a tensor under a digest of its contents, equal ones once. Returns the digest."""
    own = in_memory(tensor.detach().cpu()).clone()
    described = f"{own.dtype} {tuple(own.shape)}".encode()
    digest = hashlib.sha256(described + raw(own)).hexdigest()[:32]
    tensors[digest] = own
    return digest
