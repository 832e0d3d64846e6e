"""What the first part of a backward in two parts holds, and what it leaves to the second.

    first     gradients of inputs; each linear layer leaves its input x and dY, as the runtime does
    second    dYᵀ x for one weight after the other, added to the gradient that is there

The block runs once more for that, as its backward then keeps other tensors for longer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from parcompiler.capture.deferrable import PLACES, deferrable_weight
from parcompiler.cost.alive import Alive
from parcompiler.cost.boundary import Boundary, boundary
from parcompiler.cost.execution import differentiate, execute
from parcompiler.cost.recorder import Recorder
from parcompiler.cost.seeding import drop_gradients, roots_of, seeding
from parcompiler.cost.stand_in import storage_of, tensors

_INPUT = {linear: min({0, 1, 2} - {*places[:2]}) for linear, places in PLACES.items()}


class FirstPart(NamedTuple):
    """Bytes: the most while the first part runs, what it leaves, the largest weight of those."""

    peak: int = 0
    left: int = 0
    product: int = 0


def first_part(
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    parameters: Collection[str],
    buffers: Collection[str],
    differentiable: Collection[str],
    outputs: Sequence[fx.Node],
) -> FirstPart:
    """The first part of a block's backward; nothing where no layer can leave something.

    What cannot run without data counts nothing here: the whole backward is estimated then.
    """
    linear = _linear(nodes, parameters, differentiable)
    if not linear:
        return FirstPart()
    outside = boundary(nodes, inputs, parameters, buffers, differentiable)
    recorder = Recorder(Alive(map(storage_of, tensors(list(outside.values.values())))))
    left: list[torch.UntypedStorage] = []
    values = _forward(nodes, outside, recorder, linear, left)
    seed = seeding(roots_of({node: values[node] for node in outputs}, differentiable))
    del values
    later = {weight.name for weight in linear.values()}
    product = max(w.meta["val"].numel() * w.meta["val"].itemsize for w in linear.values())
    recorder.alive.restart()
    if seed is None or not _backward(seed, outside, recorder, later):
        return FirstPart()
    return FirstPart(recorder.alive.most, recorder.alive.now, product)


def _linear(
    nodes: Sequence[fx.Node], parameters: Collection[str], differentiable: Collection[str]
) -> dict[fx.Node, fx.Node]:
    """The layers that leave something, with their weights."""
    found = {node: deferrable_weight(node, parameters) for node in nodes}
    return {n: weight for n, weight in found.items() if weight and n.name in differentiable}


def _forward(
    nodes: Sequence[fx.Node],
    outside: Boundary,
    recorder: Recorder,
    linear: Collection[fx.Node],
    left: list[torch.UntypedStorage],
) -> dict[fx.Node, Any]:
    """Run the nodes; in their backward the layers will add to `left` what they leave."""
    values: dict[fx.Node, Any] = outside.values
    with recorder:
        execute(nodes, values, recorder)
    for node in linear:
        x = node.args[_INPUT[node.target]]
        assert isinstance(x, fx.Node), "the input of a layer is a value"
        if values[node].requires_grad:
            values[node].register_hook(_leaving(storage_of(values[x]), left))
    return values


def _leaving(x: torch.UntypedStorage, left: list[torch.UntypedStorage]) -> Any:
    """A hook that keeps the input of a layer and the gradient of its result."""

    def keep(gradient: torch.Tensor) -> None:
        left.extend((x, storage_of(gradient)))

    return keep


def _backward(
    seed: torch.Tensor, outside: Boundary, recorder: Recorder, later: Collection[str]
) -> bool:
    """Run the first part, which computes no gradient of the weights in `later`."""
    weights = {id(value) for node, value in outside.parameters.items() if node.name in later}
    drop_gradients(outside.parameters.values())
    try:
        with recorder:
            differentiate([seed], [leaf for leaf in outside.leaves if id(leaf) not in weights])
    except Exception:  # whatever it is, as in the whole backward
        return False
    return True
