"""What torch and a model are told while a model is traced, each for the time of a `with` block."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.export._trace as _trace
from torch import nn
from torch.fx._lazy_graph_module import _use_lazy_graph_module

_LOGGERS = (
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.recording",
    "torch.fx.experimental.symbolic_shapes",
)


ONE_THREAD = threading.RLock()  # these hold for the whole process: one compile at a time


@contextmanager
def quiet() -> Iterator[None]:
    """torch does not print the graph of what it refuses: the CaptureError says it."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    setattr(_trace, "print", lambda *_, **__: None)  # noqa: B010  (it has none of its own)
    try:
        yield
    finally:
        delattr(_trace, "print")
        for logger, value in zip(loggers, before, strict=True):
            logger.disabled = value


@contextmanager
def compiled_late() -> Iterator[None]:
    """What torch writes as Python on its way to a graph is compiled when it is called: hardly any
    of it is, and that takes a third of the time of an export."""
    with _use_lazy_graph_module(True):
        yield


@contextmanager
def as_if_eager() -> Iterator[None]:
    """The model is told that nothing is being compiled: some then leave out steps."""
    before = torch.compiler.is_compiling, torch.compiler.is_exporting
    torch.compiler.is_compiling = torch.compiler.is_exporting = lambda: False
    try:
        yield
    finally:
        torch.compiler.is_compiling, torch.compiler.is_exporting = before


@contextmanager
def unmoved() -> Iterator[None]:
    """`module.to(dtype)` in a forward does nothing where the module has that dtype already."""
    original: Callable[..., nn.Module] = nn.Module._apply

    def apply(self: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        tensors = itertools.chain(self.parameters(), self.buffers())
        pairs = [(tensor, fn(tensor)) for tensor in tensors]
        if all(old.dtype == new.dtype and old.device == new.device for old, new in pairs):
            return self
        return original(self, fn, recurse)

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]
