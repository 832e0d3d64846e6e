"""What a call of a layer depends on besides the layer: its arguments, and the state around it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack as function_modes

from parcompiler.capture.replay.alike import form, is_plain


class Unclear(Exception):
    """Of a value it cannot be told whether two of its kind are the same to a forward."""


@dataclass(frozen=True)
class Call:
    """One call: calls of equal `key` are the same but for the tensors, each counted once."""

    key: Hashable
    tensors: tuple[torch.Tensor, ...]


def call_of(args: Any, kwargs: Any, is_known: Callable[[torch.Tensor], bool]) -> Call | None:
    """The call with these arguments; None where one is of a kind that a forward may change.

    A tensor of which values are known (`is_known`) is equal to itself alone.
    """
    tensors: list[torch.Tensor] = []

    def key(value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            number = next((i for i, t in enumerate(tensors) if t is value), len(tensors))
            if number == len(tensors):
                tensors.append(value)
            return number, form(value), id(value) if is_known(value) else None
        if type(value) is tuple:
            return "tuple", *map(key, value)
        if is_plain(value):
            return type(value), repr(value)
        raise Unclear

    try:
        positions = tuple(map(key, args))
        names = tuple((name, key(value)) for name, value in kwargs.items())
    except Unclear:
        return None
    return Call((positions, names, _around()), tuple(tensors))


def _around() -> Hashable:
    """The state of torch that a forward may depend on, and the lines that led here."""
    kinds = ("cpu", "cuda")
    casts = [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
    return (*modes, *casts, *map(id, function_modes()), *_lines())


def _lines() -> list[tuple[Hashable, int]]:
    """Where each function that is running stands."""
    found: list[tuple[Hashable, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found
