"""Tracing patches: changes to torch for the time of a `with` block, and its stack of modes.

An export reads shapes and flags of tensors a hundred times for each parameter, and each read goes
through all function modes. Modes that are meant for the model are taken off the stack meanwhile,
and put back below the export's own when the forward begins.

>>> class Counting(ModelMode):
...     seen = 0
...     def __torch_function__(self, func, types, args=(), kwargs=None):
...         Counting.seen += 1
...         return func(*args, **(kwargs or {}))
>>> with Counting(), suspended() as resumed:
...     _ = torch.ones(2)
...     with resumed():
...         _ = torch.ones(2)
>>> Counting.seen
1
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import (
    TorchFunctionMode,
    _len_torch_function_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils import checkpoint

from parcompiler.errors import CaptureError

_LOGGERS = (
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.recording",
    "torch.fx.experimental.symbolic_shapes",
)

# The generator within `checkpoint(use_reentrant=False)`, another one from torch 2.14 on.
CHECKPOINTING = next(
    name
    for name in (
        "_checkpoint_without_reentrant_generator_impl",
        "_checkpoint_without_reentrant_generator",
    )
    if hasattr(checkpoint, name)
)
TORCH = os.path.dirname(torch.__file__) + os.sep  # the folder of its files
ONE_THREAD = threading.RLock()  # patches hold for the whole process: one compile at a time


@contextmanager
def patched(owner: Any, **attributes: Any) -> Iterator[None]:
    """In this context, attributes of a class or module are replaced."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


@contextmanager
def quiet() -> Iterator[None]:
    """Context: torch does not print graphs that it refuses, as the CaptureError describes them."""
    import torch.export._trace as _trace  # imports torch._dynamo, 1 s: only for captures

    with ExitStack() as stack:
        for name in _LOGGERS:
            stack.enter_context(patched(logging.getLogger(name), disabled=True))
        stack.enter_context(patched(_trace, print=lambda *_, **__: None))
        yield


def unmoved() -> AbstractContextManager[None]:
    """`module.to(dtype)` in a forward does nothing where the module has that dtype already."""
    original: Callable[..., nn.Module] = nn.Module._apply

    def apply(self: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        tensors = itertools.chain(self.parameters(), self.buffers())
        pairs = [(tensor, fn(tensor)) for tensor in tensors]
        if all(old.dtype == new.dtype and old.device == new.device for old, new in pairs):
            return self
        return original(self, fn, recurse)

    return patched(nn.Module, _apply=apply)


def checkpoints_run_once() -> AbstractContextManager[None]:
    """`checkpoint(use_reentrant=False)` just calls its function, as the plan decides what is
    recomputed. In an export, nested checkpoints would leave gradients switched off."""

    def wrapping(*_: Any, **__: Any) -> Iterator[None]:
        yield

    return patched(checkpoint, **{CHECKPOINTING: wrapping})


def data_detached(model: nn.Module) -> AbstractContextManager[None]:
    """`tensor.data` in the model's code is `tensor.detach()`, and assigning to it copies the value
    there: a trace would see neither values read from it nor changes of a parameter.

    What a copy cannot do raises CaptureError: another shape or dtype, memory of another tensor.
    """
    original: Any = torch._C.TensorBase.data

    def by_torch() -> bool:
        return sys._getframe(2).f_code.co_filename.startswith(TORCH)

    def data(self: torch.Tensor) -> torch.Tensor:
        """The tensor without its history."""
        detached: torch.Tensor = original.__get__(self) if by_torch() else self.detach()
        return detached

    def assign(self: torch.Tensor, value: torch.Tensor) -> None:
        """Give the tensor the numbers of another, which stays apart from it."""
        if by_torch():
            original.__set__(self, value)
            return
        if (value.shape, value.dtype) != (self.shape, self.dtype):
            message = (
                f"`.data` of a tensor ({tuple(self.shape)}, {self.dtype}) is assigned a tensor of "
                f"another kind ({tuple(value.shape)}, {value.dtype}): assign one of the same"
            )
            raise CaptureError(message)
        memory, layout = value.untyped_storage()._cdata, (value.stride(), value.storage_offset())
        same = memory == self.untyped_storage()._cdata
        if same and layout == (self.stride(), self.storage_offset()):
            return  # e.g. `weight.data = weight.data.contiguous()`
        tensors = itertools.chain(model.parameters(), model.buffers())
        if any(memory == tensor.untyped_storage()._cdata for tensor in tensors):
            message = (
                "`.data` of a tensor is assigned the memory of a parameter or buffer, and ranks do "
                "not share memory: assign a copy (`a.data = b.data.clone()`)"
            )
            raise CaptureError(message)
        self.detach().copy_(value.detach())

    return patched(torch.Tensor, data=property(data, assign))


class _Kind(type):
    """Makes all sets instances of `InOrder`, so that `isinstance(x, set)` in the model's code
    holds."""

    def __instancecheck__(cls, instance: object) -> bool:
        """Whether it is any set."""
        return isinstance(instance, set)


class InOrder(set[Any], metaclass=_Kind):
    """A set that iterates in the order of its construction, whatever the hashes of this process
    are.

    >>> list(InOrder(["full", "sliding", "full"])), InOrder("ab") == {"b", "a"}
    (['full', 'sliding'], True)
    """

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._first = dict.fromkeys(items)
        super().__init__(self._first)

    def __iter__(self) -> Iterator[Any]:
        """Its items; those added later come last."""
        yield from (item for item in self._first if item in self)
        yield from (item for item in super().__iter__() if item not in self._first)


@contextmanager
def sets_in_order(model: nn.Module) -> Iterator[None]:
    """Sets that the files of a model's classes make by `set(...)` are `InOrder`: a forward that
    goes through one (kinds of layers, say) is traced in the same order in every process."""
    files = {type(module).__module__ for module in model.modules()}
    with ExitStack() as stack:
        for name in sorted(files):
            file = sys.modules.get(name)
            users = file is not None and name.partition(".")[0] not in ("torch", "parcompiler")
            if users and "set" not in vars(file):
                stack.enter_context(patched(file, set=InOrder))
        yield


class ModelMode(TorchFunctionMode):
    """A mode for calls in the model's forward, not for torch around it."""


@contextmanager
def suspended() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """In this context, the model's modes on top of the stack are off; the yielded function puts
    them back for the time of a `with` block."""
    suspended_modes = list(_popped(lambda mode: isinstance(mode, ModelMode)))
    depth = _len_torch_function_stack()

    @contextmanager
    def resumed() -> Iterator[None]:
        above = list(_popped(lambda _: _len_torch_function_stack() >= depth))
        for mode in reversed([*above, *suspended_modes]):
            _push_mode(mode)
        try:
            yield
        finally:
            for _ in (*above, *suspended_modes):
                _pop_mode()
            for mode in reversed(above):
                _push_mode(mode)

    try:
        yield resumed
    finally:
        for mode in reversed(suspended_modes):
            _push_mode(mode)


def _popped(wanted: Callable[[TorchFunctionMode], bool]) -> Iterator[TorchFunctionMode]:
    """Take the modes that are wanted off the top of the stack, the top one first."""
    while _len_torch_function_stack():
        mode = _pop_mode()
        if not wanted(mode):
            _push_mode(mode)
            return
        yield mode
