"""The extra inputs of a compiled layer, made eagerly before each call.

    random numbers         the same as without compiling, in the same order
    parameters that fan out   their gradients are summed up over micro-batches first, see `tensor`
    products left for later   the places of their operands among the gradients, see `deferred`

The first trace of a layer, without data, finds these extras; later traces are given them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from parcompiler.errors import LaunchError
from parcompiler.temporary import having

_active: ContextVar[Trace | None] = ContextVar("trace", default=None)

Make = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]  # from the layer's tensors


class TensorForm(NamedTuple):
    """The properties of an input that a compiled function, or a random operator, depends on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    carries: bool  # a gradient

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        """The form of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> torch.Tensor:
        """A tensor of this form."""
        return torch.empty_strided(
            self.shape, self.stride, dtype=self.dtype, device=device, requires_grad=self.carries
        )


class Extra(NamedTuple):
    """Inputs of a compiled layer that `make` computes before it is called, of the forms of
    `like`."""

    make: Make
    like: tuple[torch.Tensor, ...]


def active() -> Trace | None:
    """The trace of a layer that is active; None outside of one."""
    return _active.get()


@dataclass
class Trace:
    """One pass through the forward of a layer with these `tensors`: its parameters and buffers.

    `given` are the extras; None in the first pass, which finds them and keeps them in `extras`.
    """

    tensors: Sequence[torch.Tensor]
    given: Sequence[torch.Tensor] | None = None
    extras: list[Extra] = field(default_factory=list)
    _around: Callable[[], AbstractContextManager[None]] = nullcontext  # context of the next draws
    _taken: int = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """In this context, this trace is the active one, and random operators are extras."""
        # Decompose operators as in eager mode: torch has other decompositions for its tracers, of
        # dropout for instance, which draw other numbers.
        with having(_active, self), torch._C._DisablePythonDispatcher(), _Draws(self):
            yield

    def extra(self, make: Make, *like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The next extra inputs, which `make` computes in each call; `like` are tensors of their
        form."""
        if self.given is None:
            self.extras.append(Extra(make, like))
            return like
        first, self._taken = self._taken, self._taken + len(like)
        return tuple(self.given[first : self._taken])

    def draw(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """The extra input that a random operator draws, by the forms of its operands alone."""
        if self.given is not None:
            return self.extra(lambda _: (), args[0])[0]  # which nothing calls
        leaves, structure = pytree.tree_flatten((args, kwargs))
        forms = [
            partial(TensorForm.of(leaf)._replace(carries=False).empty, leaf.device)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        ]
        around, ones = self._around, func is torch.ops.aten.native_dropout.default

        def make(_: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            leaves = [form() if isinstance(form, partial) else form for form in forms]
            if ones:
                leaves[0].fill_(1)
            args, kwargs = pytree.tree_unflatten(leaves, structure)
            with torch.no_grad(), around():
                drawn = func(*args, **kwargs)
            return (drawn[0] if isinstance(drawn, tuple) else drawn,)

        with torch.no_grad():
            like = args[0] if func._schema.is_mutable else func(*args, **kwargs)
        return self.extra(make, like[0] if isinstance(like, tuple) else like)[0]

    def place(self, tensor: torch.Tensor) -> int | None:
        """The index of a tensor among those of the layer; None if it is not one of them."""
        return next((k for k, known in enumerate(self.tensors) if known is tensor), None)

    @contextmanager
    def drawing(self, around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """In this context, random numbers will be drawn within `around`."""
        self._around = around
        try:
            yield
        finally:
            self._around = nullcontext


class _Draws(TorchDispatchMode):
    """Turns the results of random operators into extra inputs of a trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, unless it draws."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or _leaves_alone(func, args, kwargs):
            return func(*args, **kwargs)
        name = str(func).removeprefix("aten.")
        if name == "native_dropout.default":  # of ones: what each element is multiplied by
            factors = self._trace.draw(func, args, kwargs)
            return args[0] * factors, factors != 0
        if name not in DRAWS:
            message = f"{func} draws random numbers that depend on values"
            raise LaunchError(message)
        drawn = self._trace.draw(func, args, kwargs)
        return args[0].copy_(drawn) if func._schema.is_mutable else drawn


# Operators whose numbers depend on the form of their operands and on no value.
DRAWS = frozenset(
    "bernoulli.p bernoulli_.float rand.default rand_like.default randn.default randn_like.default "
    "randint.default randint.low randint_like.default randint_like.low_dtype randperm.default "
    "uniform_.default normal_.default exponential_.default geometric_.default log_normal_.default "
    "cauchy_.default random_.default random_.from random_.to".split()
)


def _leaves_alone(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a random operator draws nothing: attention without dropout."""
    names = [argument.name for argument in func._schema.arguments]
    values = dict(zip(names, args, strict=False)) | kwargs
    return "dropout_p" in names and not values.get("dropout_p", 0.0)
