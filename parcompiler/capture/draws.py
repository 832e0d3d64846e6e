"""Numbers that a forward draws from `random` or `numpy.random`, which a graph cannot repeat.

While a model is traced, a single number drawn between two bounds is a `Draw`. It answers
comparisons whose result is the same for all draws, and refuses every other use:

    if random.random() < self.layerdrop:    never, where no layer is to be dropped (0.0)
        continue

Any other draw from these modules is refused after the trace.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.utils import _pytree as pytree

from parcompiler.capture.patches import patched
from parcompiler.errors import CaptureError


class Draw:
    """A number of at least `low` and below `high` that a forward draws from a module.

    >>> draw = Draw("Model", "random", 0.0, 1.0)
    >>> draw < 0.0, draw < 1.0, draw > 0
    (False, True, True)
    >>> draw * 2
    Traceback (most recent call last):
    ...
    parcompiler.errors.CaptureError: cannot capture Model: its forward draws from random, ...
    """

    def __init__(self, model: str, module: str, low: float, high: float) -> None:
        self._model, self._module, self._low, self._high = model, module, low, high

    def __lt__(self, other: Any) -> bool:
        """Whether all draws are below a number; refused where some are."""
        if isinstance(other, int | float) and not self._low < other < self._high:
            return other >= self._high
        raise _refusal(self._model, self._module)

    def __gt__(self, other: Any) -> bool:
        """Whether all draws are above a number; refused where some are."""
        return not self < other

    __le__, __ge__ = __lt__, __gt__  # no draw is taken to equal a number (1 in 2 ** 53 does)

    def _refuse(self, *_: Any) -> Any:
        """Any other use."""
        raise _refusal(self._model, self._module)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __pow__ = __rpow__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __neg__ = __abs__ = __round__ = __bool__ = __int__ = __float__ = __format__ = _refuse
    __eq__ = __ne__ = __hash__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse functions of torch."""
        leaves = pytree.tree_leaves((args, kwargs))
        return next(leaf for leaf in leaves if isinstance(leaf, Draw))._refuse()


def _refusal(model: str, module: str) -> CaptureError:
    """The error for a forward that draws from `module` instead of torch."""
    message = (
        f"cannot capture {model}: its forward draws from {module}, which would give the same "
        "number in every step: draw with torch (torch.rand), which draws anew for each micro-batch"
    )
    return CaptureError(message)


@contextmanager
def draws_unknown(model: str) -> Iterator[None]:
    """In this context, single numbers drawn between two bounds are `Draw`s."""

    def drawing(module: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*bounds: Any, **options: Any) -> Any:
            numbers = all(isinstance(bound, int | float) for bound in bounds)
            if options or len(bounds) not in (0, 2) or not numbers:
                return original(*bounds, **options)
            return Draw(model, module, *sorted(bounds or (0.0, 1.0)))

        return draw

    with ExitStack() as stack:
        for name, functions in _SINGLE.items():
            module = sys.modules.get(name)
            if module is not None:
                patches = {f: drawing(name, vars(module)[f]) for f in functions}
                stack.enter_context(patched(module, **patches))
        yield


_SINGLE = {"random": ("random", "uniform"), "numpy.random": ("random", "rand", "uniform")}


@contextmanager
def drawing_with_torch_alone(model: str) -> Iterator[None]:
    """Refuse a forward that draws from `random` or `numpy.random`: a number drawn at capture would
    be a constant of every step."""

    def states() -> dict[str, Any]:
        numpy = sys.modules.get("numpy")
        drawn = {} if numpy is None else {"numpy.random": repr(numpy.random.get_state())}
        return {"random": random.getstate(), **drawn}

    before = states()
    yield
    for module, state in states().items():
        if before.get(module, state) != state:
            raise _refusal(model, module)
