"""Function modes that only the model's forward goes through, while torch works around it.

An export asks tensors for shapes and flags a hundred times for each parameter, and every question
goes through all modes. Those that are meant for the model are taken off the stack for that, and put
back under the export's own when the forward begins.

>>> class Counting(OfTheModel):
...     seen = 0
...     def __torch_function__(self, func, types, args=(), kwargs=None):
...         Counting.seen += 1
...         return func(*args, **(kwargs or {}))
>>> with Counting(), set_aside() as beneath:
...     _ = torch.ones(2)
...     with beneath():
...         _ = torch.ones(2)
>>> Counting.seen
1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch  # noqa: F401 (the doctest's)
from torch.overrides import (
    TorchFunctionMode,
    _len_torch_function_stack,
    _pop_mode,
    _push_mode,
)


class OfTheModel(TorchFunctionMode):
    """A mode that is meant for what the model's forward calls."""


@contextmanager
def set_aside() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Within it, the modes of this kind on top of the stack are off; what it yields puts them back
    where they were, for the time of a `with` block."""
    own = list(_taken(lambda mode: isinstance(mode, OfTheModel)))
    depth = _len_torch_function_stack()

    @contextmanager
    def beneath() -> Iterator[None]:
        above = list(_taken(lambda _: _len_torch_function_stack() >= depth))
        _put([*above, *own])
        try:
            yield
        finally:
            for _ in (*above, *own):
                _pop_mode()
            _put(above)

    try:
        yield beneath
    finally:
        _put(own)


def _taken(wanted: Callable[[TorchFunctionMode], bool]) -> Iterator[TorchFunctionMode]:
    """The modes on top of the stack that are wanted, the top one first, taken off."""
    while _len_torch_function_stack():
        mode = _pop_mode()
        if not wanted(mode):
            _push_mode(mode)
            return
        yield mode


def _put(modes: list[TorchFunctionMode]) -> None:
    """Put modes on the stack, the last one first."""
    for mode in reversed(modes):
        _push_mode(mode)
