"""Tracing patches: changes to torch for the time of a `with` block, and its stack of modes.

An export asks tensors for shapes and flags a hundred times for each parameter, and every question
goes through all function modes. Those that are meant for the model are taken off the stack for
that, and put back under the export's own when the forward begins.

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

_LOGGERS = (
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.recording",
    "torch.fx.experimental.symbolic_shapes",
)

# What `checkpoint(use_reentrant=False)` goes through: a generator, from torch 2.14 on another.
CHECKPOINTING = next(
    name
    for name in (
        "_checkpoint_without_reentrant_generator_impl",
        "_checkpoint_without_reentrant_generator",
    )
    if hasattr(checkpoint, name)
)
ONE_THREAD = threading.RLock()  # patches hold for the whole process: one compile at a time


@contextmanager
def patched(owner: Any, **attributes: Any) -> Iterator[None]:
    """Within it, a class or module has other attributes."""
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
    """torch does not print the graph of what it refuses: the CaptureError says it."""
    import torch.export._trace as _trace  # with torch._dynamo, 1 s: only who captures pays it

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
    """`checkpoint(use_reentrant=False)` calls its function, and no more: what runs again is for the
    plan to say. In an export a checkpoint within another would leave gradients switched off."""

    def wrapping(*_: Any, **__: Any) -> Iterator[None]:
        yield

    return patched(checkpoint, **{CHECKPOINTING: wrapping})


def data_detached() -> AbstractContextManager[None]:
    """`tensor.data` in the model's code is `tensor.detach()`: a trace knows nothing of what it is
    else, neither values that are read from it nor changes of a parameter in place."""
    original: Any = torch._C.TensorBase.data
    files = os.path.dirname(torch.__file__) + os.sep

    def data(self: torch.Tensor) -> torch.Tensor:
        """The tensor by itself."""
        own = sys._getframe(1).f_code.co_filename.startswith(files)
        found: torch.Tensor = original.__get__(self) if own else self.detach()
        return found

    return patched(torch.Tensor, data=property(data, original.__set__))


class _Kind(type):
    """Says of all sets that they are `InOrder`, so that the model's code finds them to be sets."""

    def __instancecheck__(cls, instance: object) -> bool:
        """Whether it is any set."""
        return isinstance(instance, set)


class InOrder(set[Any], metaclass=_Kind):
    """A set that lists what it was made of in that order, whatever the hashes of this process are.

    >>> list(InOrder(["full", "sliding", "full"])), InOrder("ab") == {"b", "a"}
    (['full', 'sliding'], True)
    """

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._first = dict.fromkeys(items)
        super().__init__(self._first)

    def __iter__(self) -> Iterator[Any]:
        """Its items, those that were added later behind the others."""
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
            own = file is not None and name.partition(".")[0] not in ("torch", "parcompiler")
            if own and "set" not in vars(file):
                stack.enter_context(patched(file, set=InOrder))
        yield


class ModelMode(TorchFunctionMode):
    """A mode that is meant for what the model's forward calls, not for torch around it."""


@contextmanager
def suspended() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Within it, the model's modes on top of the stack are off; what it yields puts them back
    where they were, for the time of a `with` block."""
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
