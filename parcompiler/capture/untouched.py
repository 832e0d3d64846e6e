"""A model that is run and afterwards is as it was, and what its forwards change besides numbers.

A captured graph computes every micro-batch as the first one. A forward that reads what an earlier
one has left in an attribute (a counter, a list that grows, its last output) computes something
else each time, and is refused. What a forward only writes (attention maps to look at), writes
before it reads it, or makes once and then keeps (tables of positions) does no harm.

>>> model = nn.Linear(1, 1)
>>> model.seen = []
>>> weight = model.weight.detach().clone()
>>> with untouched(model, lambda tensor: torch.float64):
...     model.seen.append(model.weight.dtype)
...     _ = model.weight.data.zero_()
>>> model.seen, model.weight.dtype, bool(model.weight == weight)
([], torch.float32, True)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from parcompiler.capture.loss import PREFIX, WithLoss
from parcompiler.capture.replay.alike import Attribute, is_plain
from parcompiler.capture.replay.watch import reads
from parcompiler.errors import CaptureError

_MOST = 1000  # items of a container that is looked into
_REGISTERED = ("_parameters", "_buffers", "_modules")
_OF_TORCH = frozenset(vars(nn.Module())) - {"training", *_REGISTERED}  # hooks and the like
_OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, nn.Module)


class Attributes:
    """The attributes of all modules of a model as they are now, and what these hold."""

    def __init__(self, model: nn.Module) -> None:
        self._containers: list[tuple[Any, Any]] = []  # each with a copy
        self._seen: dict[int, object] = {}  # kept, so that nothing else has the same id
        self._forms = {
            (path, name): self._form(value)
            for path, module in model.named_modules()
            for name, value in self._attributes(module)
        }

    def changed(self, later: Attributes) -> set[Attribute]:
        """Module path and name of what is another in `later`."""
        names = self._forms.keys() | later._forms.keys()
        return {at for at in names if self._forms.get(at) != later._forms.get(at)}

    def restore(self) -> None:
        """Let modules and containers hold again what they held."""
        for container, copy in self._containers:
            container.clear()
            (container.extend if isinstance(copy, list | deque) else container.update)(copy)

    def _attributes(self, module: nn.Module) -> Iterator[tuple[str, object]]:
        """The attributes of a module, with the tensors and modules that it registered."""
        held = vars(module)
        self._containers.append((held, dict(held)))
        for name, value in held.items():
            if name in _REGISTERED:
                self._containers.append((value, dict(value)))
                yield from value.items()
            elif name not in _OF_TORCH:
                yield name, value

    def _form(self, value: Any) -> Hashable:
        """Equal for what is the same to a forward: numbers by value, tensors by identity."""
        if is_plain(value):
            return type(value), repr(value)
        known = id(value) in self._seen
        self._seen[id(value)] = value
        if known or isinstance(value, (torch.Tensor, *_OPAQUE)):
            return id(value)
        items = self._items(value)
        if items is None or len(items) > _MOST:
            return id(value), None if items is None else len(items)
        return type(value), *map(self._form, items)

    def _items(self, value: Any) -> list[Any] | None:
        """What a container or an object holds; None for what holds nothing."""
        if isinstance(value, tuple | frozenset):
            return list(value)
        if not isinstance(value, dict | list | set | deque):
            value = getattr(value, "__dict__", None)
        if not isinstance(value, dict | list | set | deque):
            return None
        self._containers.append(
            (value, list(value) if isinstance(value, list | deque) else value.copy())
        )
        if isinstance(value, dict):
            return [*value, *value.values()]
        return sorted(value, key=id) if isinstance(value, set) else list(value)


@contextmanager
def untouched(
    model: nn.Module, dtype: Callable[[torch.Tensor], torch.dtype] = lambda tensor: tensor.dtype
) -> Iterator[None]:
    """Within it a model has no gradients, and its parameters and buffers have values of their own
    in the `dtype` of each; it may be run and trained. Afterwards all is as it was: these tensors
    themselves with their hooks, their values and gradients, attributes, the state of chance.
    """
    attributes = Attributes(model)
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    kept = [(tensor, tensor.data, tensor.grad, tensor.requires_grad) for tensor in tensors]
    with torch.random.fork_rng(devices=[]):
        try:
            for tensor, data, _, _ in kept:
                tensor.grad = None
                tensor.data = data.to(dtype(tensor), copy=True)
            yield
        finally:
            attributes.restore()
            for tensor, data, gradient, trained in kept:
                if tensor.grad_fn is not None:  # updated in place with a gradient
                    tensor.detach_()
                tensor.grad = None
                tensor.data = data
                tensor.requires_grad_(trained).grad = gradient


@contextmanager
def watched(
    model: nn.Module,
    around: Callable[[], AbstractContextManager[None]],
    changed: set[Attribute],
) -> Iterator[None]:
    """Within it, and within `around`, a forward runs: adds the attributes that it changes."""
    before = Attributes(model)
    try:
        with around():
            yield
    finally:
        changed |= before.changed(Attributes(model))


def check_attributes(whole: WithLoss, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a model of which a second forward reads what the first one has changed, and changes
    it again. The model is as it was afterwards.

    Raises CaptureError with the names of the attributes.
    """
    first = Attributes(whole)
    with untouched(whole), torch.enable_grad():
        whole(*args, **kwargs)
        second = Attributes(whole)
        changed = first.changed(second)
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        with reads(whole, changed, unwritten=True) as read:
            whole(*args, **kwargs)
        refused = second.changed(Attributes(whole)) & changed & read
    if refused:
        names = sorted(".".join(filter(None, at)).removeprefix(PREFIX) for at in refused)
        message = (
            f"the forward reads attributes that earlier forwards have changed ({', '.join(names)})"
            ": every micro-batch would be computed as the first one. Register such state as a "
            "buffer (a tensor) and update that in place, or pass it as an input"
        )
        raise CaptureError(message)
