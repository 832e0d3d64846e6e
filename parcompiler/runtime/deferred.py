"""Linear layers whose weight gradients can be left for later: the split backward of zero bubble.

    FORWARD           within `Deferral`: linear layers remember it
    BACKWARD_INPUT    `collect`: gradients of inputs, and of biases, which cost little; each linear
                      leaves the product for its weight
    BACKWARD_WEIGHT   `finish`: the products that were left, in the order they were met

Only products are left for later, so both halves together cost what one backward costs (the split
of 2401.10241). A product holds the input and the gradient of its layer and nothing else, so that
what the rest of the stage kept for its backward is free after the first half. Outside of a
`Deferral` the functions are those of torch.nn.functional.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


class Product(NamedTuple):
    """A gradient of `parameter` that was left for later."""

    parameter: torch.Tensor
    compute: Callable[[], torch.Tensor]


_active: ContextVar[Deferral | None] = ContextVar("deferral", default=None)


def current() -> Deferral | None:
    """The deferral within whose forward this is called."""
    return _active.get()


class Deferral:
    """Where the linear layers of one rank leave their products.

    A layer remembers the deferral at its forward, because autograd may run backwards in threads
    of its own.
    """

    def __init__(self) -> None:
        self.products: list[Product] | None = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Within it, linear layers are made so that their products can be left."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    @contextmanager
    def collect(self) -> Iterator[list[Product]]:
        """Within it, a backward leaves its products in the list."""
        self.products = []
        try:
            yield self.products
        finally:
            self.products = None


def finish(products: list[Product]) -> None:
    """Compute products that were left, and add them to the gradients of their weights.

    The products of one weight are added up first, in the order in which they were left: so does
    autograd, and the bits are the same. What a product holds is free once it is computed.
    """
    left = Counter(id(product.parameter) for product in products)
    sums: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        while products:
            parameter, gradient = _computed(products.pop(0))
            key = id(parameter)
            gradient = sums.pop(key) + gradient if key in sums else gradient
            left[key] -= 1
            if left[key]:
                sums[key] = gradient
            else:
                accumulate(parameter, gradient)


def _computed(product: Product) -> tuple[torch.Tensor, torch.Tensor]:
    """A parameter and its gradient; the product is the caller's no more."""
    return product.parameter, product.compute()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear(x, weight, bias)`: x [..., k], weight [n, k], bias [n]; the result is [..., n]."""
    deferral = _active.get()
    if deferral is None or not (torch.is_grad_enabled() and weight.requires_grad):
        return F.linear(x, weight, bias)
    made: torch.Tensor = _Linear.apply(deferral, x, weight, bias)  # type: ignore[no-untyped-call]
    return made


class Linear(torch.nn.Linear):
    """`nn.Linear`, the gradient of whose weight can be left for later."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """x Wᵀ + b."""
        return linear(input, self.weight, self.bias)


def addmm(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`torch.addmm(bias, x, weight)`: x [m, k], weight [k, n], bias [n]; the result is [m, n]."""
    deferral = _active.get()
    if deferral is None or not (torch.is_grad_enabled() and weight.requires_grad):
        return torch.addmm(bias, x, weight)
    made: torch.Tensor = _Addmm.apply(deferral, x, weight, bias)  # type: ignore[no-untyped-call]
    return made


class _Linear(torch.autograd.Function):
    """x Wᵀ + b, whose backward can leave dW = dYᵀ x for later."""

    @staticmethod
    def forward(
        ctx: Any,
        deferral: Deferral,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """The product now; input and weight for later."""
        _keep(ctx, deferral, x, weight)
        y = F.linear(x, weight, bias)
        if x.dim() != 2:  # then it may be a view, and autograd would let nobody change it in place
            y = torch.ops.aten._unsafe_view(y, y.shape)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of input and bias; that of the weight now or later."""
        x, weight = _kept(ctx)
        rows = gradients[0].reshape(-1, weight.shape[0])
        inputs = x.reshape(-1, weight.shape[1])
        dx = (rows @ weight).reshape(x.shape) if ctx.needs_input_grad[1] else None
        return None, dx, _now_or_later(ctx, lambda: rows.t() @ inputs), _bias(ctx, rows)


class _Addmm(torch.autograd.Function):
    """x W + b, whose backward can leave dW = xᵀ dY for later."""

    @staticmethod
    def forward(
        ctx: Any, deferral: Deferral, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        """The product now; input and weight for later."""
        _keep(ctx, deferral, x, weight)
        return torch.addmm(bias, x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of input and bias; that of the weight now or later."""
        x, weight = _kept(ctx)
        rows = gradients[0]
        dx = rows @ weight.t() if ctx.needs_input_grad[1] else None
        return None, dx, _now_or_later(ctx, lambda: x.t() @ rows), _bias(ctx, rows)


def _keep(ctx: Any, deferral: Deferral, x: torch.Tensor, weight: torch.Tensor) -> None:
    """What a backward needs."""
    ctx.save_for_backward(x, weight)
    ctx.deferral, ctx.parameter = deferral, weight


def _kept(ctx: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and weight. A product that held the graph behind its input would hold the leaves of
    the stage too, and their gradients."""
    x, weight = ctx.saved_tensors
    return x.detach(), weight


def _now_or_later(ctx: Any, compute: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """The gradient of the weight, or None when the product was left for later."""
    products = ctx.deferral.products
    if products is None:
        return compute()
    products.append(Product(ctx.parameter, compute))
    return None


def _bias(ctx: Any, rows: torch.Tensor) -> torch.Tensor | None:
    """The gradient of the bias, if there is one."""
    return rows.sum(0) if ctx.needs_input_grad[3] else None


def accumulate(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add to a parameter's gradient, as autograd does."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
