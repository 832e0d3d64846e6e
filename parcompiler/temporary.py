"""Settings of the process or thread that hold within a `with` block."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # torch is not imported where `parcompiler` alone is
    import torch

T = TypeVar("T")


@contextmanager
def having(variable: ContextVar[T], value: T) -> Iterator[None]:
    """In this context, a variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """In this context, torch uses this many threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """In this context, torch makes floats of integers and of nothing in `dtype`."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def uncollected() -> Iterator[None]:
    """In this context, Python collects no garbage. Imports and the compiler make objects by the
    million that stay, modules, graphs and lists of instructions, and the collector would visit them
    again and again (a fifth of the time of a plan for GPT-3)."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
