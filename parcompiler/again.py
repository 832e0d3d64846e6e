"""Operators that run again in the backward, so that their results are not kept.

    forward     gate ──► silu ──► y ──► product         keeps gate, and the call that makes y
    backward    gate ──► silu ──► y ──► product' ──► dy ──► silu' ──► d gate

Within `RunningAgain` any operator that saves such a result, or a view of it, saves a `ResultView`.
The first use in the backward recomputes the result, with its own graph, which the operator's
backward uses and frees. (Megatron-LM's `CheckpointWithoutOutput` does the same by emptying the
result's memory.) In a compiled layer the results of `again` are marked instead, and the compiler's
backward recomputes them.

>>> x = torch.ones(3, requires_grad=True)
>>> with RunningAgain():
...     y = again(torch.exp, x) * 2
>>> _ = y.sum().backward()
>>> x.grad
tensor([5.4366, 5.4366, 5.4366])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

from parcompiler.temporary import having

Operator = Callable[..., torch.Tensor]

_active: ContextVar[RunningAgain | None] = ContextVar("running again", default=None)


def again(operator: Operator, *operands: torch.Tensor) -> torch.Tensor:
    """`operator(*operands)`, which may be a module; within `RunningAgain` the backward computes it
    again.

    The result must be new memory, and the only effect: the operator draws no random numbers, and
    operands and result are never changed in place.
    """
    scope = _active.get()
    if scope is None or not torch.is_grad_enabled():
        with marked() if traceback.has_preserved_node_meta() else nullcontext():
            return operator(*operands)
    if isinstance(operator, nn.Module):
        names, weights = zip(*operator.named_parameters(), strict=True)
        operator, operands = _with_weights(operator, names), (*operands, *weights)
    call = OperatorCall(operator, [scope.pack(operand) for operand in operands], scope)
    result: torch.Tensor = _Again.apply(call, *operands)  # type: ignore[no-untyped-call]
    scope.made[result.untyped_storage()] = call
    return result


def _with_weights(module: nn.Module, names: Sequence[str]) -> Operator:
    """A module as a function of its operand and its parameters."""

    def call(operand: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = functional_call(
            module, dict(zip(names, weights, strict=True)), (operand,)
        )
        return result

    return call


@contextmanager
def marked() -> Iterator[None]:
    """In this context, operators that AOTAutograd traces are marked: its partitioner recomputes
    their results in the backward."""
    traceback.current_meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    try:
        yield
    finally:
        del traceback.current_meta["recompute"]


def once() -> AbstractContextManager[None]:
    """In this context, nothing runs again."""
    return having(_active, None)


class RunningAgain(saved_tensors_hooks):
    """In this context, results of `again` are not kept; `made` maps their memory to the calls."""

    def __init__(self) -> None:
        super().__init__(self.pack, self.unpack)
        self.made: WeakKeyDictionary[torch.UntypedStorage, OperatorCall] = WeakKeyDictionary()

    def __enter__(self) -> Self:  # type: ignore[override]  # torch returns nothing
        self._token = _active.set(self)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _active.reset(self._token)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Pack a saved tensor: a view of a result to recompute, or the result of `keep`."""
        call = self.made.get(tensor.untyped_storage())
        if call is None or tensor.is_conj() or tensor.is_neg():
            return self.keep(tensor.detach())  # an output would keep its node, and so itself
        place = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return ResultView(call, tensor.dtype, *place)

    def unpack(self, packed: Any) -> torch.Tensor:
        """Inverse of `pack`."""
        return packed.tensor() if isinstance(packed, ResultView) else self.kept(packed)

    def keep(self, tensor: torch.Tensor) -> Any:
        """Pack a tensor that is kept."""
        return tensor

    def kept(self, packed: Any) -> torch.Tensor:
        """Inverse of `keep`."""
        tensor: torch.Tensor = packed
        return tensor


@dataclass(frozen=True, slots=True)
class ResultView:
    """A view of the result of a call, perhaps as real and imaginary parts."""

    call: OperatorCall
    dtype: torch.dtype
    shape: Sequence[int]
    stride: Sequence[int]
    offset: int

    def tensor(self) -> torch.Tensor:
        """The view, without a gradient."""
        result = self.call.result().detach()
        if result.dtype != self.dtype:
            view = torch.empty(0, dtype=self.dtype, device=result.device)
            return view.set_(result.untyped_storage(), self.offset, self.shape, self.stride)
        if (result.shape, result.stride()) == (self.shape, self.stride):
            return result
        return result.as_strided(self.shape, self.stride, self.offset)


class OperatorCall:
    """One call of an operator, which can be repeated."""

    def __init__(self, operator: Operator, operands: Sequence[Any], scope: RunningAgain) -> None:
        self.operator, self._operands, self._scope = operator, operands, scope
        self.carries: Sequence[bool] = ()  # which operands have gradients
        self._context = copy_context()  # autograd may run a backward in another thread
        self._leaves: list[torch.Tensor] = []
        self._result: torch.Tensor | None = None

    def result(self) -> torch.Tensor:
        """The result, recomputed on first use."""
        if self._result is None:
            for packed, carries in zip(self._operands, self.carries, strict=True):
                leaf = self._scope.unpack(packed).detach()
                self._leaves.append(leaf.requires_grad_(carries))
            self._result = self._context.run(self._run)
        return self._result

    def gradients(self, gradient: torch.Tensor) -> list[torch.Tensor | None]:
        """Gradients of the operands, after which the recomputed result is freed."""
        result, leaves = self.result(), self._leaves
        self._result, self._leaves, self._operands = None, [], ()
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = iter(torch.autograd.grad(result, wanted, gradient, allow_unused=True))
        return [next(gradients) if leaf.requires_grad else None for leaf in leaves]

    def _run(self) -> torch.Tensor:
        with once(), torch.enable_grad():
            return self.operator(*self._leaves)


class _Again(torch.autograd.Function):
    """A call whose own graph is not kept."""

    @staticmethod
    def forward(ctx: Any, call: OperatorCall, *operands: torch.Tensor) -> torch.Tensor:
        ctx.call, call.carries = call, ctx.needs_input_grad[1:]
        return call.operator(*operands)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.call.gradients(gradients[0])
