"""Running the nodes of a block on tensors without data, and the gradients of its outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from parcompiler.cost.exchange import exchanged, note
from parcompiler.cost.held import Held
from parcompiler.cost.operation import Operation, describe, label
from parcompiler.cost.recorder import Recorder
from parcompiler.cost.stand_in import CPU, is_differentiable, stand_in, tensors
from parcompiler.graph import dtype_of

Environment = dict[fx.Node, Any]


def execute(
    nodes: Iterable[fx.Node],
    values: Environment,
    recorder: Recorder,
    held: Held | None = None,
) -> list[str]:
    """Run `nodes` in order; their results are added to `values`.

    `held` lets values go again. Returns the operators that could not run without data: their cost
    is estimated from the shapes that were recorded.
    """
    estimated = []
    for contexts, run in groupby(nodes, key=lambda node: node.meta.get("contexts", ())):
        with entered(contexts):
            for node in run:
                target, (args, kwargs) = _target(node), _arguments(node, values)
                if held is not None:
                    held.before()
                noted, grad_mode = len(recorder.operations), torch.is_grad_enabled()
                try:
                    values[node] = _run(node, target, args, kwargs, recorder)
                except Exception:  # whatever it is: the recorded shapes still say what comes out
                    del recorder.operations[noted:]
                    if "exchange" in node.meta:
                        note(node.meta["exchange"], dtype_of(node), recorder)
                    torch.set_grad_enabled(grad_mode)
                    values[node] = _estimate(node, args, kwargs, recorder)
                    estimated.append(label(node.target))
                if held is not None:
                    held.after(node, values)
    return estimated


def _run(node: fx.Node, target: Any, args: Any, kwargs: Any, recorder: Recorder) -> Any:
    """The result of a node; ranks may exchange something in it."""
    said = node.meta.get("exchange")
    if said is None:
        return target(*args, **kwargs)
    if target.likeness is None:
        return exchanged(node, args, recorder)
    note(said, dtype_of(node), recorder)
    return target(*args, **kwargs)


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


def _arguments(node: fx.Node, values: Environment) -> tuple[Any, Any]:
    """The node's arguments with values for nodes, on the device of the stand-ins."""

    def value(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return values[argument]
        return CPU if isinstance(argument, torch.device) else argument

    return map_aggregate((node.args, node.kwargs), value)


def _target(node: fx.Node) -> Any:
    assert node.op == "call_function", f"{node.format_node()} is no operator"
    return node.target


@contextmanager
def entered(contexts: Iterable[tuple[Any, ...]]) -> Iterator[None]:
    """The contexts that the nodes were captured under; autocast only where it meets the CPU."""
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


class _Estimated(torch.autograd.Function):
    """An operator that is known by its shapes alone; its backward costs twice its forward."""

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


def _estimate(node: fx.Node, args: Any, kwargs: Any, recorder: Recorder) -> Any:
    """The recorded result, with gradients to the inputs that have them."""
    result = stand_in(node.meta.get("val"))
    operation = _guess(node, args, kwargs, result)
    recorder.add(operation)
    inputs = [tensor for tensor in tensors((args, kwargs)) if tensor.requires_grad]
    floating = tuple(tensor for tensor in tensors(result) if is_differentiable(tensor))
    if not inputs or not floating or not torch.is_grad_enabled():
        return result
    if operation is None:  # it costs nothing itself, but gradients pass through it
        operation = Operation(str(node.target), "other", 0.0, 0.0, floating[0].dtype)
    attached = _Estimated.apply(recorder, operation, floating, *inputs)  # type: ignore[no-untyped-call]
    by_id = dict(zip(map(id, floating), attached, strict=True))
    return map_aggregate(result, lambda item: by_id.get(id(item), item))


def _guess(node: fx.Node, args: Any, kwargs: Any, result: Any) -> Operation | None:
    """The cost by the operator's formula, or by its elements when the formula fails too."""
    try:
        return describe(node.target, args, kwargs, result)
    except Exception:
        return describe(node.target, args, kwargs, result, by_formula=False)
