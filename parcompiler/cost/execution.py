"""Runs the nodes of a block on tensors without data, and records the operators below autograd."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from parcompiler.again import again
from parcompiler.capture.effects import outside
from parcompiler.cost.live_memory import ForwardVariables, LiveMemory
from parcompiler.cost.operation import EXCHANGE, Operation, describe, label
from parcompiler.cost.stand_in import CPU, run, source, stand_in
from parcompiler.errors import InputError
from parcompiler.graph import NodeRoles, dtype_of, is_floating, tensors_of
from parcompiler.spmd.conversions import moved
from parcompiler.spmd.runtime_call import NodeCollectives


class Recorder(TorchDispatchMode):
    """Records every operator that costs something, in order, and the live memory.

    With `accelerator` dropout runs in the kernels of accelerators: one that keeps a mask of bytes,
    and that of attention, which draws its mask again in the backward. The CPU multiplies by a mask
    of the value's dtype, and decomposes attention with dropout. RMS norms are one kernel on
    accelerators, and about twenty on the CPU, which keep two copies in float32. The nodes in
    `again` run again in the backward (see `again`).
    """

    def __init__(
        self,
        memory: LiveMemory | None = None,
        *,
        accelerator: bool = False,
        again: Collection[fx.Node] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.accelerator, self.again = accelerator, again
        self.operations: list[Operation] = []
        self.memory = memory or LiveMemory()
        self.left: list[tuple[Operation, object]] = []  # products, with the tensors they hold
        self.place: int | None = None  # of the node whose forward or backward runs

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator on meta tensors, and record it."""
        result = run(func, args, kwargs or {})
        self.memory.record(result)
        self.add(describe(func, args, kwargs or {}, result))
        return result

    def add(self, operation: Operation | None) -> None:
        """Record one operation; None stands for one that costs nothing."""
        if operation is not None:
            self.operations.append(dataclasses.replace(operation, place=self.place))

    def follow(self, result: object) -> None:
        """Record the backward of a node's result at the place of the node."""
        place, key = self.place, "parcompiler"
        functions = [tensor.grad_fn for tensor in tensors_of(result)]
        while functions:
            function: Any = functions.pop()
            if function is not None and key not in function.metadata:
                function.metadata[key] = place
                function.register_prehook(lambda _: setattr(self, "place", place))
                functions += [before for before, _ in function.next_functions]

    def add_exchange(
        self,
        exchange: NodeCollectives,
        dtype: torch.dtype,
        *,
        backward: bool = False,
        steps: Sequence[Operation] = (),
    ) -> None:
        """Record the collectives of a conversion's forward or backward. Beside the first run the
        products that were left, and all but one of the `steps` of the call that contains it."""
        for action, nbytes in exchange.backward if backward else exchange.forward:
            sent = moved(action, nbytes, exchange.n)
            beside = *(product for product, _ in self.left), *steps[len(steps) // exchange.n :]
            self.add(
                Operation(
                    action,
                    EXCHANGE,
                    0.0,
                    sent,
                    dtype,
                    exchange.n,
                    beside,
                    apart=exchange.apart,
                    axis=exchange.axis,
                )
            )
            self.left.clear()

    def take(self) -> tuple[Operation, ...]:
        """The operations since the last call."""
        taken, self.operations = tuple(self.operations), []
        return taken


@dataclass
class Boundary:
    """Stand-ins for the values that a block reads from outside, and the leaves of its backward."""

    received: dict[fx.Node, Any] = field(default_factory=dict)
    parameters: dict[fx.Node, Any] = field(default_factory=dict)
    buffers: dict[fx.Node, Any] = field(default_factory=dict)
    leaves: list[torch.Tensor] = field(default_factory=list)

    @property
    def values(self) -> dict[fx.Node, Any]:
        """All stand-ins, by node."""
        return self.received | self.parameters | self.buffers


def boundary(nodes: Sequence[fx.Node], inputs: Collection[fx.Node], roles: NodeRoles) -> Boundary:
    """Stand-ins for all that `nodes` read from outside, in the order of use.

    Raises InputError for a node that is no input, parameter or buffer.
    """
    made = Boundary()
    for node in outside(nodes):
        value = node.meta.get("val")
        if node in inputs and node.name in roles.differentiable:
            made.received[node], leaves = source(value)
            made.leaves += leaves
        elif node in inputs:
            made.received[node] = stand_in(value)
        elif node.name in roles.parameters:
            made.parameters[node] = stand_in(value)
            if is_floating(made.parameters[node]):
                made.leaves.append(made.parameters[node].requires_grad_())
        elif node.name in roles.buffers or node.op == "get_attr":
            made.buffers[node] = stand_in(value)
        else:
            message = (
                f"the block reads {node.name!r}, which is none of its inputs, parameters and "
                "buffers: list it as one of them"
            )
            raise InputError(message)
    return made


def execute(
    nodes: Iterable[fx.Node],
    values: dict[fx.Node, Any],
    recorder: Recorder,
    variables: ForwardVariables | None = None,
    made: Callable[[fx.Node], object] = lambda _: None,
) -> list[str]:
    """Run `nodes` in order; their results are added to `values`, and `variables` removes some.
    `made` is called with each node after it has run.

    Returns the operators that could not run without data: their cost is estimated from the recorded
    shapes.
    """

    estimated = []
    with closing(calls(nodes, values, CPU)) as steps:
        for place, (node, args, kwargs) in enumerate(steps):
            recorder.place = place
            if variables is not None:
                variables.before()
            count, grad_mode = len(recorder.operations), torch.is_grad_enabled()
            try:
                if node in recorder.again:
                    operands = [values[operand] for operand in node.all_input_nodes]
                    values[node] = again(partial(_run, node, recorder), *operands)
                else:
                    values[node] = _result(node, args, kwargs, recorder)
            except Exception:  # of any kind: the recorded shapes still describe the result
                del recorder.operations[count:]
                if "exchange" in node.meta:
                    recorder.add_exchange(node.meta["exchange"], dtype_of(node))
                torch.set_grad_enabled(grad_mode)
                values[node] = _estimate(node, args, kwargs, recorder)
                estimated.append(label(node.target))
            recorder.follow(values[node])
            made(node)
            if variables is not None:
                variables.after(node, values)
    return estimated


def calls(
    nodes: Iterable[fx.Node], values: Mapping[fx.Node, Any], device: torch.device
) -> Generator[tuple[fx.Node, Any, Any], None, None]:
    """The nodes in order with their arguments on a device, each under the contexts of its capture.
    Neighbours with the same contexts share one entry into them.

    The caller must close the generator, so that the contexts end if a node fails.
    """
    for contexts, members in groupby(nodes, key=lambda node: node.meta.get("contexts", ())):
        with _entered(contexts):
            for node in members:
                assert node.op == "call_function", f"{node.format_node()} is no operator"
                arguments = partial(_argument, values, device)
                yield node, *map_aggregate((node.args, node.kwargs), arguments)


def _run(node: fx.Node, recorder: Recorder, *operands: torch.Tensor) -> Any:
    """The result of a node from its operands."""
    values = dict(zip(node.all_input_nodes, operands, strict=True))
    arguments = map_aggregate((node.args, node.kwargs), partial(_argument, values, CPU))
    return _result(node, *arguments, recorder)


def _argument(values: Mapping[fx.Node, Any], device: torch.device, item: Any) -> Any:
    """An argument of a node, with its value."""
    if isinstance(item, fx.Node):
        return values[item]
    return device if isinstance(item, torch.device) else item


def _result(node: fx.Node, args: Any, kwargs: Any, recorder: Recorder) -> Any:
    """The result of a node, which may contain collectives."""
    target: Any = node.target
    exchange = node.meta.get("exchange")
    if exchange is not None and target.likeness is None:  # a conversion
        (value,) = tensors_of(args)
        shares = target.shares and value.shape == node.meta["val"].shape
        # Not the tensor itself: autograd would treat it as an operand, and wait for its own lock.
        make = None if shares else partial(stand_in, node.meta["val"])
        return _Exchanged.apply(value, exchange, recorder, make)  # type: ignore[no-untyped-call]
    if exchange is not None and not exchange.within:
        recorder.add_exchange(exchange, dtype_of(node))
    count = len(recorder.operations)
    run = _FUSED.get(target, target) if recorder.accelerator else target
    result = run(*args, **kwargs)
    if exchange is not None and exchange.within:
        recorder.add_exchange(exchange, dtype_of(node), steps=recorder.operations[count:])
        _follow_steps(result, exchange, recorder)
    elif exchange is not None and exchange.backward and result.requires_grad:
        returned = partial(recorder.add_exchange, exchange, dtype_of(node), backward=True)
        result.register_hook(lambda _: returned())
    return result


def _follow_steps(result: torch.Tensor, exchange: NodeCollectives, recorder: Recorder) -> None:
    """Record the collectives in the backward of a call, beside its own operations."""
    if not exchange.backward or result.grad_fn is None:
        return
    counts: list[int] = []

    def before(_: Any) -> None:
        counts.append(len(recorder.operations))

    def behind(*_: Any) -> None:
        steps = recorder.operations[counts.pop() :]
        recorder.add_exchange(exchange, result_dtype, backward=True, steps=steps)

    result_dtype = result.dtype
    result.grad_fn.register_prehook(before)
    result.grad_fn.register_hook(behind)


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Attention without its dropout, which costs the kernel no memory and almost no time. For
    values of another width than queries, only accelerators have a kernel that keeps no scores."""
    if value.shape[-1] != query.shape[-1] and query.dim() == 4 and not enable_gqa:
        more: Any = attn_mask, True, 0.0, is_causal
        return _EFFICIENT(query, key, value, *more, scale=scale)[0]
    more = attn_mask, 0.0, is_causal
    return _ATTENTION(query, key, value, *more, scale=scale, enable_gqa=enable_gqa)


def _dropout(x: torch.Tensor, p: float, train: bool) -> Any:
    """Dropout by the kernel that keeps a mask of bytes."""
    return torch.ops.aten.native_dropout.default(x, p, train)[0] if train and p else x


def _rms_norm(x: torch.Tensor, shape: list[int], weight: Any = None, eps: Any = None) -> Any:
    """An RMS norm by one kernel each way, which keeps its operands and a number for each row.

    Modelled as a layer norm, which keeps one number more per row; operands of several dtypes have
    no such kernel.
    """
    if weight is not None and weight.dtype != x.dtype:
        return torch.ops.aten.rms_norm.default(x, shape, weight, eps)
    return torch.ops.aten.native_layer_norm.default(x, shape, weight, None, eps or 0.0)[0]


_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default
_FUSED = {
    _ATTENTION: _attention,
    torch.ops.aten.dropout.default: _dropout,
    torch.ops.aten.rms_norm.default: _rms_norm,
}


class _Exchanged(torch.autograd.Function):
    """A conversion without data: the shapes of both sides, and the collectives.

    The result is a view of the value, or the result of `make`.
    """

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, exchange: NodeCollectives, recorder: Recorder, make: Any
    ) -> torch.Tensor:
        ctx.exchange, ctx.recorder = exchange, recorder
        ctx.like = value.shape, value.dtype
        recorder.add_exchange(exchange, value.dtype)
        made: torch.Tensor = value.view_as(value) if make is None else make()
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        shape, dtype = ctx.like
        ctx.recorder.add_exchange(ctx.exchange, dtype, backward=True)
        made: torch.Tensor = stand_in(torch.empty(shape, dtype=dtype, device="meta"))
        return made, None, None, None


def differentiate(roots: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
    """Run the backward from `roots` to all `leaves`; nothing when there are none of either."""
    if roots and leaves:
        gradients = [torch.empty_like(root) for root in roots]
        torch.autograd.grad(roots, leaves, gradients, allow_unused=True)


def doubled(operation: Operation) -> Operation:
    """The estimate of an operation's backward: a gradient for each of two inputs."""
    return dataclasses.replace(
        operation,
        name=f"{operation.name} (backward)",
        flops=2 * operation.flops,
        nbytes=2 * operation.nbytes,
    )


@contextmanager
def _entered(contexts: Iterable[tuple[Any, ...]]) -> Iterator[None]:
    """Enters the contexts under which the nodes were captured; of autocast only that of the CPU."""
    with ExitStack() as stack:
        for context in contexts:
            match context:
                case ("no_grad",):
                    stack.enter_context(torch.no_grad())
                case ("autocast", "cpu", str(dtype), bool(enabled)):
                    cast = torch.autocast(
                        "cpu", getattr(torch, dtype.removeprefix("torch.")), enabled=enabled
                    )
                    stack.enter_context(cast)
        yield


def _estimate(node: fx.Node, args: Any, kwargs: Any, recorder: Recorder) -> Any:
    """The recorded result, with gradients to the inputs that have them."""
    result = stand_in(node.meta.get("val"))
    try:
        operation = describe(node.target, args, kwargs, result)
    except Exception:  # by its elements when the formula of the operator fails too
        operation = describe(node.target, args, kwargs, result, by_formula=False)
    recorder.add(operation)
    inputs = [tensor for tensor in tensors_of((args, kwargs)) if tensor.requires_grad]
    floating = tuple(tensor for tensor in tensors_of(result) if is_floating(tensor))
    if not inputs or not floating or not torch.is_grad_enabled():
        return result
    if operation is None:  # it costs nothing itself, but gradients pass through it
        operation = Operation(str(node.target), "other", 0.0, 0.0, floating[0].dtype)
    attached = _Estimated.apply(recorder, operation, floating, *inputs)  # type: ignore[no-untyped-call]
    by_id = dict(zip(map(id, floating), attached, strict=True))
    return map_aggregate(result, lambda item: by_id.get(id(item), item))


class _Estimated(torch.autograd.Function):
    """An operator that is known only by its shapes; its backward costs twice its forward."""

    @staticmethod
    def forward(
        ctx: Any,
        recorder: Recorder,
        operation: Operation,
        results: tuple[torch.Tensor, ...],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.recorder, ctx.operation = recorder, operation
        ctx.save_for_backward(*inputs)
        return results

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.recorder.add(doubled(ctx.operation))
        return None, None, None, *map(torch.empty_like, ctx.saved_tensors)
