"""Temporary empty caches for the cached functions of a model's files.

A cached function (`functools.lru_cache`) returns the tensors of its first call. Tensors of an
earlier forward would be constants of a trace, tensors of a trace would outlive it, and the model in
another precision would compute with tensors of its own precision.

>>> @functools.cache
... def table() -> object:
...     return object()
>>> Model = type("Model", (nn.Module,), {"__module__": "own", "table": staticmethod(table)})
>>> first = Model.table()
>>> with own_caches(Model()):
...     Model.table() is first, Model.table() is Model.table()
(False, True)
>>> Model.table() is first
True
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn

_Cache = type(functools.cache(id))


@contextmanager
def own_caches(model: nn.Module) -> Iterator[None]:
    """In this context, cached functions in the files and classes of a model have empty caches."""
    fresh: dict[int, Any] = {}
    with ExitStack() as stack:
        for put, cache in list(_caches(model)):
            if id(cache) not in fresh:
                empty = functools.lru_cache(**cache.cache_parameters())
                fresh[id(cache)] = empty(cache.__wrapped__)
            put(fresh[id(cache)])
            stack.callback(put, cache)
        yield


def _caches(model: nn.Module) -> Iterator[tuple[Callable[[Any], None], Any]]:
    """The cached functions of a model, each with a function that replaces it."""
    classes = {kind for module in model.modules() for kind in type(module).__mro__}
    names = {kind.__module__ for kind in classes}
    modules = {n for n in names if n.partition(".")[0] not in ("torch", "parcompiler", "builtins")}
    files = [sys.modules[name] for name in sorted(modules) if name in sys.modules]
    owners = dict.fromkeys((*files, *(kind for kind in classes if kind.__module__ in modules)))
    for file in files:
        named = (x for x in vars(file).values() if isinstance(x, type))
        owners |= dict.fromkeys(x for x in named if x.__module__ == file.__name__)
    seen: set[int] = set()
    for owner in owners:
        for name, value in list(vars(owner).items()):
            kind = type(value) if isinstance(value, staticmethod | classmethod) else None
            function = value if kind is None else value.__func__
            if isinstance(function, _Cache):
                yield partial(_set, owner, name, kind), function
            yield from _within(function, seen)


def _within(function: object, seen: set[int]) -> Iterator[tuple[Callable[[Any], None], Any]]:
    """Cached functions in the closure of a function, as decorators make them."""
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a cell that is still empty
            inner = cell.cell_contents
            if isinstance(inner, _Cache):
                yield partial(setattr, cell, "cell_contents"), inner
            yield from _within(inner, seen)


def _set(owner: Any, name: str, kind: Callable[[Any], Any] | None, function: Any) -> None:
    """Replace the function `name` of a file or class."""
    setattr(owner, name, function if kind is None else kind(function))
