"""Linear layers whose weight gradients can be left for later.

They wait for an instruction of their own, in the split backward of zero bubble:

    FORWARD           within `Deferral`: linear layers remember it
    BACKWARD_INPUT    `collect`: gradients of inputs, and of biases, which cost little; each linear
                      leaves the product for its weight
    BACKWARD_WEIGHT   `finish`: the products that were left, in the order they were met

or, in a whole backward, for the next collective of the tensor ranks, and are computed beside it
(the asynchronous all-reduce of Megatron-LM's column-parallel layers, 2205.05198):

    BACKWARD          dY2 W2 │ gelu' │ dY1 W1 │ dY2ᵀ x2, dY1ᵀ x1 │ norm' │ ..     `beside`
    tensor ranks                              │ all-reduce of dx │

Only products are left for later, so both halves together cost what one backward costs (the split
of 2401.10241). A product holds only the input and the gradient of its layer, so that everything
else the stage saved for its backward is freed after the first half. Outside of a `Deferral` the
functions are those of torch.nn.functional.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F

from parcompiler.runtime.compiled import tracing
from parcompiler.runtime.mixed_precision import widen
from parcompiler.temporary import having


class DeferredProduct(NamedTuple):
    """A gradient of `parameter` that is computed later."""

    parameter: torch.Tensor
    compute: Callable[[], torch.Tensor]


Final = Callable[[torch.Tensor], object]  # called with each parameter whose gradient is complete

_active: ContextVar[Deferral | None] = ContextVar("deferral", default=None)


def current() -> Deferral | None:
    """The deferral whose `forward` context is active; None outside of one."""
    return _active.get()


class Deferral:
    """Where the linear layers of one rank leave their products.

    A layer remembers the deferral at its forward, because autograd may run backwards in threads
    of its own.
    """

    def __init__(self) -> None:
        self.products: list[DeferredProduct] | None = None

    def awaits(self, parameter: torch.Tensor) -> bool:
        """Whether a product for a parameter has been left."""
        return any(product.parameter is parameter for product in self.products or ())

    def forward(self) -> AbstractContextManager[None]:
        """In this context, linear layers are made so that their products can be left."""
        return having(_active, self)

    @contextmanager
    def collect(self) -> Iterator[list[DeferredProduct]]:
        """In this context, a backward leaves its products in the list."""
        self.products = []
        try:
            yield self.products
        finally:
            self.products = None

    @contextmanager
    def beside(self, final: Final) -> Iterator[Callable[[], None]]:
        """In this context, a backward leaves its products until the function is called, or its end.

        No weight may have two of them, or another gradient.
        """
        with self.collect() as products:

            def compute() -> None:
                finish(products, final)

            yield compute
            compute()


def finish(products: list[DeferredProduct], final: Final = lambda _: None) -> None:
    """Compute products that were left, and add them to the gradients of their weights, which are
    `final` then.

    The products of one weight are added up first, in the order in which they were left, as autograd
    does: results are bitwise equal. The tensors of a product are free once it is computed.
    """
    remaining = Counter(id(product.parameter) for product in products)
    sums: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        while products:
            parameter, compute = products.pop(0)
            gradient, key = compute(), id(parameter)
            del compute  # with the input and the gradient of its layer
            gradient = sums.pop(key) + gradient if key in sums else gradient
            remaining[key] -= 1
            if remaining[key]:
                sums[key] = gradient
                continue
            if parameter.grad is None:
                parameter.grad = gradient
                widen(parameter)
            else:
                parameter.grad += gradient
            final(parameter)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear(x, weight, bias)`: x [..., k], weight [n, k], bias [n]; the result is [..., n]."""
    return _product(F.linear, x, weight, bias)


class Linear(torch.nn.Linear):
    """`nn.Linear` whose weight gradient can be left for later."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """x Wᵀ + b."""
        return linear(input, self.weight, self.bias)


def addmm(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`torch.addmm(bias, x, weight)`: x [m, k], weight [k, n], bias [n]; the result is [m, n]."""
    return _product(_addmm, x, weight, bias)


Operator = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]


def _addmm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.addmm(bias, x, weight)


def _product(
    operator: Operator, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`operator(x, weight, bias)`, whose backward can leave a product within a deferral."""
    deferral = _active.get()
    if deferral is None or not (torch.is_grad_enabled() and weight.requires_grad):
        return operator(x, weight, bias)
    if (trace := tracing.active()) is not None:
        return _traced(trace, operator, x, weight, bias)
    y: torch.Tensor = _Deferrable.apply(deferral, operator, x, weight, bias)  # type: ignore[no-untyped-call]
    return y


class _Deferrable(torch.autograd.Function):
    """x Wᵀ + b (`_addmm`: x W + b), whose backward can leave dW = dYᵀ x (xᵀ dY) for later.
    Of complex numbers one factor is conjugated: dW = dYᵀ x̄, and dx = dY W̄.

    In a layer that is compiled there is no deferral: the factors of dW go out as the gradients of
    two extra inputs, which `_Operands` made."""

    @staticmethod
    def forward(
        ctx: Any,
        deferral: Deferral | None,
        operator: Operator,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *places: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the product; save input and weight."""
        ctx.save_for_backward(x, weight)
        ctx.deferral, ctx.transposed = deferral, operator is F.linear
        if deferral is not None:
            ctx.parameter = weight
        y = operator(x, weight, bias)
        if x.dim() != 2:  # y may be a view, which autograd forbids changing in place
            y = torch.ops.aten._unsafe_view(y, y.shape)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of input and bias; that of the weight now or later, or dY and x."""
        x, weight = cast(tuple[torch.Tensor, torch.Tensor], ctx.saved_tensors)
        rows = _rows(gradients[0])
        dx = None
        if ctx.needs_input_grad[2]:
            weight = weight.conj()  # of real numbers the tensor itself
            dx = (rows @ (weight if ctx.transposed else weight.t())).reshape(x.shape)
        bias = rows.sum(0) if ctx.needs_input_grad[4] else None
        if ctx.deferral is None:
            return None, None, dx, None, bias, gradients[0], x
        dw = _left(ctx.deferral, ctx.parameter, gradients[0], x, transposed=ctx.transposed)
        return None, None, dx, dw, bias


class _Operands(torch.autograd.Function):
    """Two inputs of a compiled layer with the shapes of dY and x, expanded from scalars; their
    gradients are dY and x, from which the weight's is computed now or later."""

    @staticmethod
    def forward(
        ctx: Any,
        deferral: Deferral,
        weight: torch.Tensor,
        transposed: bool,
        shapes: tuple[torch.Size, torch.Size],
    ) -> tuple[torch.Tensor, ...]:
        ctx.deferral, ctx.parameter, ctx.transposed = deferral, weight, transposed
        return tuple(weight.new_zeros(()).expand(shape) for shape in shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dw = _left(ctx.deferral, ctx.parameter, *gradients, transposed=ctx.transposed)
        return None, dw, None, None


def _traced(
    trace: tracing.Trace,
    operator: Operator,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """`_product` in a trace."""
    place, transposed = trace.place(weight), operator is F.linear
    assert place is not None, "only products of a layer's own parameters are left for later"
    shapes = torch.Size([*x.shape[:-1], weight.shape[0 if transposed else 1]]), x.shape

    def make(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        made = _Operands.apply(current(), tensors[place], transposed, shapes)  # type: ignore[no-untyped-call]
        return cast(tuple[torch.Tensor, ...], made)

    like = [x.new_zeros(()).expand(shape).requires_grad_() for shape in shapes]
    places = trace.extra(make, *like)
    y: torch.Tensor = _Deferrable.apply(None, operator, x, weight, bias, *places)  # type: ignore[no-untyped-call]
    return y


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., k] as [n, k]; for k = 0 torch cannot infer n."""
    return x.reshape(x.shape[:-1].numel() if x.shape[-1] == 0 else -1, x.shape[-1])


def _left(
    deferral: Deferral, parameter: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, *,
    transposed: bool,
) -> torch.Tensor | None:  # fmt: skip
    """The gradient of the weight, or None if its product is left for later."""
    rows = _rows(dy)
    # Detached: a reference to the graph of the input would keep the leaves of the stage alive, and
    # their gradients.
    inputs = _rows(x.detach().conj())
    left, right = (rows, inputs) if transposed else (inputs, rows)

    def compute() -> torch.Tensor:
        return left.t() @ right

    if deferral.products is None:
        return compute()
    deferral.products.append(DeferredProduct(parameter, compute))
    return None
