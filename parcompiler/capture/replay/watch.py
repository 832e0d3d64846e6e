"""What a forward reads and changes beside its arguments and tensors, seen while it runs."""

from __future__ import annotations

import itertools
import operator
import os
import random
import sys
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from parcompiler.capture.replay.alike import Attribute

_TORCH = os.path.dirname(torch.__file__) + os.sep


@contextmanager
def reads(
    layer: nn.Module, watched: Collection[Attribute], *, unwritten: bool = False
) -> Iterator[set[Attribute]]:
    """Within it, the attributes among `watched` that anybody reads are added to what it yields.

    Who takes hold of the `__dict__` of a module, other than torch itself, reads all of them.
    With `unwritten`, what was written before within it does not count, nor numbers that are read
    in no other lines than those that write them (a counter that nobody asks).
    """
    found: set[Attribute] = set()
    reading: dict[Attribute, set[tuple[str, int]]] = {}  # the lines of code
    written: dict[Attribute, set[tuple[str, int]]] = {}
    paths = {path for path, _ in watched}
    places = {id(vars(m)): p for p, m in layer.named_modules() if p in paths}
    kinds = {type(m) for p, m in layer.named_modules() if p in paths}
    names = {name for _, name in watched}

    def place(module: nn.Module) -> str | None:
        return places.get(id(object.__getattribute__(module, "__dict__")))

    def note(module: nn.Module, name: str) -> None:
        path = place(module)
        if path is None:
            return
        if name != "__dict__":
            if (path, name) in found or (path, name) not in written:
                found.add((path, name))
                reading.setdefault((path, name), set()).add(_line())
        elif not sys._getframe(2).f_code.co_filename.startswith(_TORCH):
            found.update(item for item in watched if item[0] == path)

    def noting(original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def get(self: nn.Module, name: str) -> Any:
            if name == "__dict__" or name in names:
                note(self, name)
            return original(self, name)

        return get

    def writing(original: Callable[..., None]) -> Callable[..., None]:
        def put(self: nn.Module, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            path = place(self)
            if path is not None:
                lines = written.setdefault((path, name), set())
                if isinstance(value, int | float):
                    lines.add(_line())
            original(self, name, value, *args, **kwargs)

        return put

    methods = {"__getattribute__": noting}
    if unwritten:
        methods |= dict.fromkeys(("__setattr__", "register_buffer"), writing)
    before = {(kind, name): vars(kind).get(name) for kind in kinds for name in methods}
    for kind, name in before:
        setattr(kind, name, methods[name](getattr(kind, name)))  # of the class: of all instances
    try:
        yield found
        found -= {at for at, lines in reading.items() if lines <= written.get(at, set())}
    finally:
        for (kind, name), own in before.items():
            if own is None:
                delattr(kind, name)
            else:
                setattr(kind, name, own)


def _line() -> tuple[str, int]:
    """The line of code that reads or writes an attribute."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((__file__, _TORCH)):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


class Surroundings:
    """What a forward may have changed: attributes, its file's variables, chances drawn.

    >>> layer = nn.Identity()
    >>> layer.seen = []
    >>> before = Surroundings(layer)
    >>> before.unchanged()
    True
    >>> layer.seen.append(1)
    >>> before.unchanged()
    False
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._chances = _chances()
        self._values = self._look()

    def unchanged(self) -> bool:
        """Whether all is as it was when this was made."""
        now = self._look()
        same = len(now) == len(self._values) and all(map(operator.is_, now, self._values))
        return same and _chances() == self._chances

    def _look(self) -> list[Any]:
        """The objects that stand everywhere now; these hold them, so that none is taken for another
        of the same place in memory."""
        owners = [vars(module) for module in self._layer.modules()]
        files = {type(module).__module__ for module in self._layer.modules()}
        owners += [vars(sys.modules[name]) for name in sorted(files) if name in sys.modules]
        values = [value for owner in owners for value in (*owner, *owner.values())]
        values += [item for value in list(values) for item in _inside(value)]
        return values


def _inside(value: Any) -> Iterator[Any]:
    """What a container or an object holds."""
    if type(value) in (list, tuple, set, frozenset):
        yield from value
    elif isinstance(value, dict):
        yield from itertools.chain(value, value.values())
    elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module | ModuleType):
        yield from vars(value).values()


def _chances() -> Hashable:
    """The states of the random numbers of Python and of numpy."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate()
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), kind, keys.tobytes(), *rest
