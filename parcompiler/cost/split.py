"""What the first part of a backward in two parts holds, and what it leaves to the second.

    first     gradients of inputs; each linear layer leaves its input x and dY, as the runtime does
    second    dYᵀ x for one weight after the other, added to the gradient that is there

The block runs once more for that, as its backward then keeps other tensors for longer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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


class Left(NamedTuple):
    """What a layer leaves: the name of its weight, its input, the gradient of its result."""

    weight: str
    x: torch.UntypedStorage
    gradient: torch.UntypedStorage


class FirstPart(NamedTuple):
    """Bytes: the most while the first part runs, what it leaves, the largest weight of those and
    all of them; the most while it and while the second run if gradients of parameters stay.
    `inputs` are the positions of the block's inputs that it leaves besides."""

    peak: int = 0
    left: int = 0
    product: int = 0
    weights: int = 0
    first: int = 0
    second: int = 0
    inputs: tuple[int, ...] = ()


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
    received = outside.received
    recorder = Recorder(Alive(map(storage_of, tensors(list(outside.values.values())))))
    left: list[Left] = []
    values = _forward(nodes, outside, recorder, linear, left)
    seed = seeding(roots_of({node: values[node] for node in outputs}, differentiable))
    del values
    later = {w.name: w.meta["val"].numel() * w.meta["val"].itemsize for w in linear.values()}
    recorder.alive.restart()
    if seed is None or not _backward(seed, outside, recorder, later):
        return FirstPart()
    del seed
    alive, sizes = recorder.alive, later.values()
    found = FirstPart(alive.most, alive.now, max(sizes), sum(sizes), alive.fullest)
    places = _places(left, [received.get(node) for node in inputs])
    return found._replace(inputs=places, second=_second(left, alive, later))


def _places(left: Sequence[Left], inputs: Sequence[Any]) -> tuple[int, ...]:
    """The positions of the inputs that layers have left."""
    read = {item.x for item in left}
    storages = ({storage_of(tensor) for tensor in tensors(value)} for value in inputs)
    return tuple(i for i, own in enumerate(storages) if own & read)


def _second(left: list[Left], alive: Alive, sizes: Mapping[str, int]) -> int:
    """The most in the second part if the gradients that it makes stay; nothing is left then."""
    most, made = 0, set[str]()
    while left:
        made.add(left[0].weight)
        most = max(most, alive.now + sum(sizes[name] for name in made))
        del left[0]
    return most


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
    linear: Mapping[fx.Node, fx.Node],
    left: list[Left],
) -> dict[fx.Node, Any]:
    """Run the nodes; in their backward the layers will add to `left` what they leave."""
    values: dict[fx.Node, Any] = outside.values
    with recorder:
        execute(nodes, values, recorder)
    for node, weight in linear.items():
        x = node.args[_INPUT[node.target]]
        assert isinstance(x, fx.Node), "the input of a layer is a value"
        if values[node].requires_grad:
            values[node].register_hook(_leaving(weight.name, storage_of(values[x]), left))
    return values


def _leaving(weight: str, x: torch.UntypedStorage, left: list[Left]) -> Any:
    """A hook that keeps the input of a layer and the gradient of its result."""

    def keep(gradient: torch.Tensor) -> None:
        left.append(Left(weight, x, storage_of(gradient)))

    return keep


def _backward(
    seed: torch.Tensor, outside: Boundary, recorder: Recorder, later: Collection[str]
) -> bool:
    """Run the first part, which computes no gradient of the weights in `later`."""
    weights = {id(value) for node, value in outside.parameters.items() if node.name in later}
    drop_gradients(outside.parameters.values(), recorder.alive.keep)
    try:
        with recorder:
            differentiate([seed], [leaf for leaf in outside.leaves if id(leaf) not in weights])
    except Exception:  # whatever it is, as in the whole backward
        return False
    return True
