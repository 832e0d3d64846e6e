"""What a block costs, found by running it: operators, FLOPs, bytes moved, bytes kept.

The nodes run on tensors that have a shape, strides and a dtype but no data (see `stand_in`), so
that nothing is computed, whatever the sizes. What autograd chooses by device (which attention
kernel, how a dropout mask is kept) is as on the CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from parcompiler.capture.deferrable import deferrable_weight
from parcompiler.cost.alive import Alive
from parcompiler.cost.boundary import Boundary, boundary
from parcompiler.cost.exchange import EXCHANGE, note
from parcompiler.cost.execution import differentiate, doubled, execute
from parcompiler.cost.held import Gone, Held
from parcompiler.cost.operation import Operation, describe
from parcompiler.cost.recorder import Recorder
from parcompiler.cost.saved import Saved
from parcompiler.cost.seeding import drop_gradients, roots_of, seeding
from parcompiler.cost.split import FirstPart, first_part
from parcompiler.cost.stand_in import stand_in, storage_of, tensors
from parcompiler.graph import dtype_of

Storages = set[torch.UntypedStorage]


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The cost of a block for one micro-batch; sizes in bytes.

    `forward` and `backward` are the operators in order, `weight` those of `backward` that can be
    left for later: products for the weights of linear layers. `saved` is kept from the forward to
    the backward, apart from parameters, buffers and the block's inputs; `saved_inputs` are those of
    its inputs that are kept. `output_bytes` is the size of all outputs, `parameter_bytes` that of
    the trainable parameters. `estimated` names the operators that could not run without data
    ("backward" for the backward as a whole): their cost is a guess from shapes.

    A value on the boundary of two blocks occupies memory once: `saved_outputs` is the part of
    `saved` that the outputs occupy; `kept_inputs` and `kept_outputs` are the positions of the
    inputs and outputs that are kept (the same for all blocks of a template), `kept` their names
    in the block that was traced.

    What is alive at most besides parameters, their gradients and the inputs: `forward_peak` while
    the forward runs, `backward_peak` while the backward does, the gradients of the outputs among
    it. Of a backward in two parts, `input_peak` is that of the first; `left` are the bytes that
    its linear layers leave to the second, besides the inputs at the positions `left_inputs`, and
    it has a gradient of `weight_peak` bytes at a time.
    `gradient_bytes` is the size of the outputs that receive gradients; `held_peak` is the
    `backward_peak` where somebody holds these to the end. Of a block that is
    recomputed, `bare_peak` is that of its forward, which keeps nothing, and `again_peak` that of
    its second run, which ends when all is there that the backward needs. In the first backward of a
    step gradients of parameters stay: with them the peaks are `first_peak`, `first_input_peak` and
    `first_weight_peak`, which is that of the second part, where those of weights of `weight_left`
    bytes come.
    """

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    saved: int
    saved_inputs: int
    output_bytes: int
    parameter_bytes: int
    estimated: tuple[str, ...]
    saved_outputs: int = 0
    kept: tuple[str, ...] = ()
    kept_inputs: tuple[int, ...] = ()
    kept_outputs: tuple[int, ...] = ()
    weight: tuple[Operation, ...] = ()
    forward_peak: int = 0
    backward_peak: int = 0
    input_peak: int = 0
    left: int = 0
    left_inputs: tuple[int, ...] = ()
    weight_peak: int = 0
    gradient_bytes: int = 0
    first_peak: int = 0
    first_input_peak: int = 0
    first_weight_peak: int = 0
    weight_left: int = 0
    bare_peak: int = 0
    again_peak: int = 0
    held_peak: int = 0


def trace_block(
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    parameters: Collection[str],
    buffers: Collection[str],
    differentiable: Collection[str],
    *,
    split: bool = False,
    gone: Gone | None = None,
) -> BlockCost:
    """The cost of the block that consists of `nodes`, in topological order.

    `inputs` are the nodes outside that it reads, `outputs` its nodes that are used outside.
    `parameters` (trainable) and `buffers` (also frozen parameters) are names of placeholders,
    `differentiable` the names of the nodes that carry gradients. With `split` it is asked as well
    what a backward in two parts holds. `gone` says with which node the values of others are let go,
    if nothing keeps them (see `naming.lifetimes`); the rest live to the end. Raises InputError when
    the block reads a node that is none of these.
    """
    given = nodes, inputs, parameters, buffers, differentiable
    with torch.enable_grad():
        outside = boundary(*given)
        recorder = Recorder(Alive(_storages(outside.values)))
        held = Held(recorder.alive, gone or {})
        results, saved, estimated = _forward(nodes, outputs, outside, recorder, held)
        results = {n: v if n.name in differentiable else _detached(v) for n, v in results.items()}
        forward, forward_peak, kept = recorder.take(), recorder.alive.most, saved.storages()
        roots = roots_of(results, differentiable)
        cost = _known(nodes, inputs, outputs, parameters, differentiable, outside, results, kept)
        gradients = sum(root.numel() * root.itemsize for root in roots)
        seed = seeding(roots, recorder.alive.hold)
        del results, kept, roots  # the backward frees what it has used
        if not _backward(seed, outside, recorder):
            estimated.append("backward")
            _guess_backward(nodes, forward, recorder)
        parts = first_part(*given, outputs) if split else FirstPart()
    return dataclasses.replace(
        cost,
        forward=forward,
        backward=recorder.take(),
        estimated=tuple(dict.fromkeys(estimated)),
        forward_peak=forward_peak,
        backward_peak=recorder.alive.most if seed is not None else 0,
        gradient_bytes=gradients,
        input_peak=parts.peak,
        left=parts.left,
        left_inputs=parts.inputs,
        weight_peak=parts.product,
        first_peak=recorder.alive.fullest if seed is not None else 0,
        first_input_peak=parts.first,
        first_weight_peak=parts.second,
        weight_left=parts.weights,
        bare_peak=held.most,
        again_peak=saved.most,
        held_peak=recorder.alive.held if seed is not None else 0,
    )


def _known(
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    parameters: Collection[str],
    differentiable: Collection[str],
    outside: Boundary,
    results: Mapping[fx.Node, Any],
    kept: Storages,
) -> BlockCost:
    """What is known of a block between its forward and its backward: sizes."""
    values = outside.received | dict(results)
    touched = [node for node in values if kept & _storages({node: values[node]})]
    received, produced = _storages(outside.received), _storages(results)
    own = kept - received - _storages(outside.parameters) - _storages(outside.buffers)
    return BlockCost(
        forward=(),
        backward=(),
        saved=_size(own),
        saved_inputs=_size(kept & received),
        output_bytes=_nbytes(results),
        parameter_bytes=_nbytes(outside.parameters),
        estimated=(),
        saved_outputs=_size(own & produced),
        kept=tuple(node.name for node in touched),
        kept_inputs=tuple(i for i, node in enumerate(inputs) if node in touched),
        kept_outputs=tuple(i for i, node in enumerate(outputs) if node in touched),
        weight=tuple(_products(nodes, parameters, differentiable)),
    )


def _forward(
    nodes: Sequence[fx.Node],
    outputs: Iterable[fx.Node],
    outside: Boundary,
    recorder: Recorder,
    held: Held,
) -> tuple[dict[fx.Node, Any], Saved, list[str]]:
    """Run the nodes: the outputs, what is kept for their backward, what was estimated.

    Only the outputs survive, so that what just led to dropped values is not kept.
    """
    values = outside.values
    with Saved(recorder.alive) as saved, recorder:
        estimated = execute(nodes, values, recorder, held)
    results = {node: values[node] for node in outputs}
    del values
    return results, saved, estimated


def _backward(seed: torch.Tensor | None, outside: Boundary, recorder: Recorder) -> bool:
    """Run the backward; False, with nothing noted, when it needs data."""
    recorder.alive.restart()
    if seed is None:
        return True
    drop_gradients(outside.parameters.values(), recorder.alive.keep)
    try:
        with recorder:
            differentiate([seed], outside.leaves)
    except Exception:  # whatever it is, as in the forward
        recorder.take()
        return False
    return True


def _guess_backward(
    nodes: Sequence[fx.Node], forward: Sequence[Operation], recorder: Recorder
) -> None:
    """Note a backward that could not run: twice each operation, and what ranks exchange in it."""
    for operation in reversed(forward):
        if operation.kind != EXCHANGE:
            recorder.add(doubled(operation))
    for node in reversed(nodes):
        if "exchange" in node.meta:
            note(node.meta["exchange"], dtype_of(node), recorder, backward=True)


def _detached(value: Any) -> Any:
    """A value that no gradient comes to, which keeps nothing for one."""
    return map_aggregate(value, lambda v: v.detach() if isinstance(v, torch.Tensor) else v)


def _products(
    nodes: Iterable[fx.Node], parameters: Collection[str], differentiable: Collection[str]
) -> Iterator[Operation]:
    """The products dYᵀ x that linear layers can leave for later."""
    for node in nodes:
        weight = deferrable_weight(node, parameters)
        if weight is not None and node.name in differentiable:
            y, gradient = stand_in(node.meta["val"]), stand_in(weight.meta["val"])
            rows, columns = y.shape[:-1].numel(), y.shape[-1]
            inputs = gradient.numel() // max(1, columns)
            operands = y.new_empty(columns, rows), y.new_empty(rows, inputs)
            product = describe(torch.ops.aten.mm.default, operands, {}, gradient)
            assert product is not None, "a product costs something"
            yield product


def _storages(values: Mapping[Any, Any]) -> Storages:
    return {storage_of(tensor) for tensor in tensors(values)}


def _size(storages: Storages) -> int:
    return sum(storage.nbytes() for storage in storages)


def _nbytes(values: Mapping[Any, Any]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors(values))
