"""Costs of a block, found by running it without data: operators, FLOPs, bytes moved, live memory.

The nodes run on tensors that have a shape, strides and a dtype but no data (see `stand_in`), so
that nothing is computed at any size. Autograd's choices by device (which attention kernel) are
those of the CPU, except for dropout, which is that of the device.

A backward may run in two parts (zero-bubble schedules, Qi et al. 2023, arXiv 2401.10241):

    first     gradients of inputs; each linear layer defers its input x and dY, as the runtime does
    second    dYᵀ x for one weight after the other, added to its gradient

In a whole backward, dYᵀ x waits for the next collective of the tensor ranks and runs beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from parcompiler.again import RunningAgain
from parcompiler.capture.clean import where
from parcompiler.capture.deferrable import PLACES, deferrable_weight, overlapping
from parcompiler.capture.effects import overload_name
from parcompiler.cost.execution import (
    Boundary,
    Recorder,
    boundary,
    differentiate,
    doubled,
    execute,
)
from parcompiler.cost.live_memory import (
    ForwardVariables,
    LiveMemory,
    SavedTensors,
    backward_seed,
    free_gradients,
)
from parcompiler.cost.operation import EXCHANGE, Operation, describe
from parcompiler.cost.stand_in import stand_in, storages
from parcompiler.errors import CaptureError
from parcompiler.graph import NodeRoles, dtype_of, tensors_of

Overwritten = Mapping[fx.Node, Collection[fx.Node]]
Storages = set[torch.UntypedStorage]

# The position of the input among the arguments of a linear layer.
_INPUT = {linear: min({0, 1, 2} - {*places[:2]}) for linear, places in PLACES.items()}


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The cost of a block for one micro-batch; sizes in bytes.

    `forward` and `backward` are the operators in order, `weight` those of `backward` that can be
    deferred: products for the weights of linear layers. `saved` is kept from the forward to the
    backward, without parameters, buffers and the block's inputs; `saved_inputs` are the inputs
    that are kept. `output_bytes` is the size of all outputs, `gradient_bytes` that of outputs that
    receive gradients. `estimated` names the operators that could not run without data
    ("backward" for the backward as a whole): their cost is a guess from shapes.

    A value on the boundary of two blocks occupies memory once: `saved_outputs` is the part of
    `saved` that the outputs occupy; `kept_inputs` and `kept_outputs` are the positions of the
    inputs and outputs that are kept (the same for all blocks of a template).

    Peaks of the live memory, besides parameters, their gradients and the inputs:

        forward_peak       the forward
        backward_peak      the backward, with the gradients of the outputs
        first_peak         the first backward of a step, in which gradients of parameters stay
        output_peak        the backward where a caller keeps the gradients of the outputs to its end
        input_peak         the first part of a backward in two parts
        first_input_peak   as input_peak, in the first backward of a step, with copies as in
                           `copied_peak`
        first_weight_peak  the second part, in the first backward of a step
        copied_peak        `first_peak` where gradients are copied to float32 for masters
        unsaved_peak       the forward of a block that is recomputed, which saves nothing
        recompute_peak     its second run, up to the last tensor that the backward needs

    `deferred` are the bytes that linear layers keep from the first part to the second, besides the
    inputs at the positions `deferred_inputs`; `weight_peak` is the largest gradient that the second
    part makes, `deferred_weights` the sum of all.
    """

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    saved: int
    saved_inputs: int
    output_bytes: int
    estimated: tuple[str, ...]
    saved_outputs: int = 0
    kept_inputs: tuple[int, ...] = ()
    kept_outputs: tuple[int, ...] = ()
    weight: tuple[Operation, ...] = ()
    forward_peak: int = 0
    backward_peak: int = 0
    input_peak: int = 0
    deferred: int = 0
    deferred_inputs: tuple[int, ...] = ()
    weight_peak: int = 0
    gradient_bytes: int = 0
    first_peak: int = 0
    copied_peak: int = 0
    first_input_peak: int = 0
    first_weight_peak: int = 0
    deferred_weights: int = 0
    unsaved_peak: int = 0
    recompute_peak: int = 0
    output_peak: int = 0


def trace_block(
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    roles: NodeRoles,
    *,
    split: bool = False,
    overwritten: Overwritten | None = None,
    accelerator: bool = False,
    again: Collection[fx.Node] = (),
) -> BlockCost:
    """The cost of the block that consists of `nodes`, in topological order.

    `inputs` are the nodes outside that it reads, `outputs` its nodes that are used outside; `roles`
    say what placeholders are, and which nodes carry gradients. With `split` the block runs once
    more with a backward in two parts, whose tensors live longer. `overwritten` has for each node
    the values that are released with it unless something saves them (see `naming.variables`); all
    others live to the end. With `accelerator` some operators run in fused kernels, and the nodes in
    `again` run again in the backward (see `execution.Recorder`). Raises InputError when the block
    reads any other node.
    """
    reads, differentiable = (nodes, inputs, outputs, roles), roles.differentiable
    with torch.enable_grad():
        outside = boundary(nodes, inputs, roles)
        memory = LiveMemory(storages(outside.values))
        recorder = Recorder(memory, accelerator=accelerator, again=again)
        variables, saved = ForwardVariables(memory, overwritten or {}), SavedTensors(memory)
        values = outside.values
        with saved, recorder:
            products = overlapping(nodes, roles.parameters)
            leaving = _leaving(
                {node: _product(node, weight) for node, weight in products.items()},
                values,
                recorder.left.append,
                saved,
            )
            estimated = execute(nodes, values, recorder, variables, leaving)
        # Only outputs survive, so that tensors saved for dropped values are freed; outputs that
        # carry no gradient are detached.
        results = {
            node: values[node]
            if node.name in differentiable
            else map_aggregate(values[node], lambda v: v.detach() if isinstance(v, Tensor) else v)
            for node in outputs
        }
        del values, leaving
        forward, forward_peak, kept = recorder.take(), memory.peak, saved.storages()
        sizes = _sizes(inputs, outputs, outside, results, kept)
        roots = _roots(results, differentiable)
        gradient_bytes = sum(root.numel() * root.itemsize for root in roots)
        seed = backward_seed(roots, memory)
        del results, kept, roots  # the backward frees what it has used
        backward = _backward(nodes, seed, outside, recorder, roles)
        recorder.left.clear()
        if not backward:
            estimated.append("backward")
            _guess_backward(nodes, forward, recorder)
        peaks: dict[str, Any] = {
            "backward_peak": memory.peak,
            "first_peak": memory.peak_with_gradients,
            "copied_peak": memory.peak_with_copies,
            "output_peak": memory.peak_with_outputs,
        }
        in_two_parts = _first_part(*reads, accelerator, again) if split else {}
    return BlockCost(
        forward=forward,
        backward=recorder.take(),
        weight=tuple(_product(node, weight) for node, weight in _linear(nodes, roles).items()),
        estimated=tuple(dict.fromkeys(estimated)),
        forward_peak=forward_peak,
        gradient_bytes=gradient_bytes,
        unsaved_peak=variables.peak,
        recompute_peak=saved.peak,
        **sizes,
        **(peaks if seed is not None else {}),
        **in_two_parts,
    )


def _sizes(
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    outside: Boundary,
    results: Mapping[fx.Node, Any],
    kept: Storages,
) -> dict[str, Any]:
    """The fields of a `BlockCost` that are known between its forward and its backward."""
    values = outside.received | dict(results)
    touched = [node for node in values if kept & storages({node: values[node]})]
    received, produced = storages(outside.received), storages(results)
    saved = kept - received - storages(outside.parameters) - storages(outside.buffers)
    return {
        "saved": _size(saved),
        "saved_inputs": _size(kept & received),
        "output_bytes": _nbytes(results),
        "saved_outputs": _size(saved & produced),
        "kept_inputs": tuple(i for i, node in enumerate(inputs) if node in touched),
        "kept_outputs": tuple(i for i, node in enumerate(outputs) if node in touched),
    }


def _roots(results: Mapping[fx.Node, Any], differentiable: Collection[str]) -> list[Tensor]:
    """The results that receive a gradient."""
    carrying = (value for node, value in results.items() if node.name in differentiable)
    return [tensor for value in carrying for tensor in tensors_of(value) if tensor.requires_grad]


def _refuse_missing(error: Exception, nodes: Iterable[fx.Node]) -> None:
    """Raise CaptureError where a backward failed for lack of a derivative, with the line."""
    missing = re.match(r"derivative for (?:aten::)?(\w+) is not implemented", str(error))
    if missing is not None:
        node = next((node for node in nodes if overload_name(node) == missing[1]), None)
        message = (
            f"torch has no derivative of {missing[1]!r}, which gradients would have to go through: "
            f"detach what it reads, or write it another way{f'; {where(node)}' if node else ''}"
        )
        raise CaptureError(message) from error


def _backward(
    nodes: Sequence[fx.Node],
    seed: Tensor | None,
    outside: Boundary,
    recorder: Recorder,
    roles: NodeRoles,
    deferred: Collection[str] = (),
) -> bool:
    """Run the backward, without the gradients of the weights that are `deferred`; False, with
    nothing recorded, when it needs data. Raises CaptureError for lack of a derivative."""
    recorder.memory.restart()
    if seed is None:
        return True
    free_gradients(outside.parameters, recorder.memory, roles.masters)
    weights = {id(value) for node, value in outside.parameters.items() if node.name in deferred}
    try:
        with recorder:
            differentiate([seed], [leaf for leaf in outside.leaves if id(leaf) not in weights])
    except Exception as error:  # of any kind, as in the forward
        _refuse_missing(error, nodes)
        recorder.take()
        return False
    return True


def _guess_backward(
    nodes: Sequence[fx.Node], forward: Sequence[Operation], recorder: Recorder
) -> None:
    """Record a backward that could not run: each operation twice, and the collectives in it."""
    for operation in reversed(forward):
        if operation.kind != EXCHANGE:
            recorder.add(doubled(operation))
    for recorder.place, node in reversed([*enumerate(nodes)]):
        if "exchange" in node.meta:
            recorder.add_exchange(node.meta["exchange"], dtype_of(node), backward=True)


def _linear(nodes: Iterable[fx.Node], roles: NodeRoles) -> dict[fx.Node, fx.Node]:
    """The linear layers whose weight gradients can be deferred, with their weights."""
    weights = {node: deferrable_weight(node, roles.parameters) for node in nodes}
    return {node: w for node, w in weights.items() if w and node.name in roles.differentiable}


def _product(node: fx.Node, weight: fx.Node) -> Operation:
    """The product dYᵀ x of one linear layer."""
    y, gradient = stand_in(node.meta["val"]), stand_in(weight.meta["val"])
    rows, columns = y.shape[:-1].numel(), y.shape[-1]
    inputs = gradient.numel() // max(1, columns)
    operands = y.new_empty(columns, rows), y.new_empty(rows, inputs)
    product = describe(torch.ops.aten.mm.default, operands, {}, gradient)
    assert product is not None, "a product costs something"
    return product


Left = tuple[Any, tuple[torch.UntypedStorage, torch.UntypedStorage]]  # with a layer's x and dY


def _first_part(
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    roles: NodeRoles,
    accelerator: bool,
    again: Collection[fx.Node],
) -> dict[str, Any]:
    """The fields of a `BlockCost` about a backward in two parts; empty where no layer can defer, or
    where the backward cannot run without data: then the whole backward is estimated."""
    linear = _linear(nodes, roles)
    if not linear:
        return {}
    outside = boundary(nodes, inputs, roles)
    memory = LiveMemory(storages(outside.values))
    recorder = Recorder(memory, accelerator=accelerator, again=again)
    deferred: list[Left] = []
    values: dict[fx.Node, Any] = outside.values
    names = {node: weight.name for node, weight in linear.items()}
    with RunningAgain() as scope, recorder:
        execute(nodes, values, recorder, made=_leaving(names, values, deferred.append, scope))
    results = {node: values[node] for node in outputs}
    seed = backward_seed(_roots(results, roles.differentiable), memory)
    del results
    del values
    sizes = {w.name: w.meta["val"].numel() * w.meta["val"].itemsize for w in linear.values()}
    if seed is None or not _backward(nodes, seed, outside, recorder, roles, sizes):
        return {}
    del seed
    kept_sizes = {
        w.name: w.meta["val"].numel() * torch.float32.itemsize
        if w.name in roles.masters
        else sizes[w.name]
        for w in linear.values()
    }
    kept = {id(x) for _, (x, _) in deferred}  # not the storages, which must end below
    received = [storages({node: outside.received.get(node)}) for node in inputs]
    places = (
        i for i, operands in enumerate(received) if any(id(each) in kept for each in operands)
    )
    return {
        "input_peak": memory.peak,
        "first_input_peak": memory.peak_with_copies,
        "deferred": memory.now,
        "deferred_inputs": tuple(places),
        "weight_peak": max(sizes.values()),
        "deferred_weights": sum(kept_sizes.values()),
        "first_weight_peak": _second_peak(deferred, memory, sizes, kept_sizes),
    }


def _leaving(
    layers: Mapping[fx.Node, Any],
    values: Mapping[fx.Node, Any],
    leave: Callable[[Left], None],
    scope: RunningAgain,
) -> Callable[[fx.Node], None]:
    """A callback for executed nodes: makes linear `layers` leave their input and the gradient of
    their result in the backward."""

    def made(node: fx.Node) -> None:
        if node not in layers or not values[node].requires_grad:
            return
        x = node.args[_INPUT[node.target]]
        assert isinstance(x, fx.Node), "the input of a layer is a value"
        layer, packed = layers[node], scope.pack(values[x])

        def left(dy: Tensor) -> None:
            leave((layer, (scope.unpack(packed).untyped_storage(), dy.untyped_storage())))

        values[node].register_hook(left)

    return made


def _second_peak(
    deferred: list[Left], memory: LiveMemory, sizes: Mapping[str, int], kept: Mapping[str, int]
) -> int:
    """The peak of the second part if its gradients stay, in `kept` bytes each, which differ from
    `sizes` where a gradient is copied to float32. Frees the deferred tensors."""
    peak, made = 0, set[str]()
    while deferred:
        name = deferred[0][0]
        made.add(name)
        copied = sizes[name] if kept[name] != sizes[name] else 0
        peak = max(peak, memory.now + copied + sum(kept[name] for name in made))
        del deferred[0]
    return peak


def _size(memory: Storages) -> int:
    return sum(storage.nbytes() for storage in memory)


def _nbytes(values: Mapping[Any, Any]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors_of(values))
