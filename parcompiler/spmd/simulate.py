"""Runs a strategy on simulated ranks, and compares it with the operator on whole values.

Every rank gets operands and incoming gradients according to their types; values and gradients of
all ranks, combined by type, must equal those of the whole.

>>> from parcompiler.spmd.placement import P, R, S
>>> call = example(torch.ops.aten.mm.default, torch.ones(2, 4).double(), torch.ones(4, 3).double())
>>> faults(call, Strategy((S(1), S(0)), (P,)), n=2)
()
>>> faults(call, Strategy((S(1), S(0)), (R,)), n=2)[0]
'result 0 of S(1) S(0) -> R differs from the whole'
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from parcompiler.graph import is_floating, tensors_of
from parcompiler.pieces import piece
from parcompiler.spmd.call import NodeCall, read
from parcompiler.spmd.placement import I, P, Placement, R, join, take
from parcompiler.spmd.strategy import Strategy, localized

Values = Sequence[torch.Tensor]
TOLERANCE = 1e-9


def example(target: Callable[..., Any], *args: Any, **kwargs: Any) -> NodeCall:
    """A call of an operator on real tensors, in the form of a graph's node.

    Gradients go to the tensors that require them; to all floating ones when none does.
    """
    graph = fx.Graph()
    carrying: set[str] = set()

    def placeholder(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = value.detach()
        if value.requires_grad:
            carrying.add(node.name)
        return node

    nodes = pytree.tree_map(placeholder, (args, kwargs))
    node = graph.call_function(target, *nodes)
    with torch.no_grad():
        node.meta["val"] = run(read(node), [x.clone() for x in _values(read(node))])
    return read(node, {*carrying, node.name} if carrying else None)


def faults(call: NodeCall, strategy: Strategy, n: int, size: float = 1.0) -> tuple[str, ...]:
    """The faults of a strategy on the values of `call` and random gradients of about `size`; empty
    if it is right.

    Strategies that draw different numbers on each rank are not run, nor special ones.
    """
    if strategy.draws == "own" or strategy.special:
        return ()
    with torch.random.fork_rng(devices=[]):  # torch.manual_seed would also seed other devices
        torch.default_generator.manual_seed(0)
        return tuple(_faults(call, strategy, n, size))


def _faults(call: NodeCall, strategy: Strategy, n: int, size: float) -> Iterator[str]:
    """Values first, then gradients."""
    seed = int(torch.randint(1 << 30, ()))
    leaves = _leaves(call, _values(call))
    whole = list(tensors_of(_seeded(call, leaves, seed)))
    operands = [dealt(v, t, n) for v, t in zip(_values(call), strategy.inputs, strict=True)]
    ranks = [_leaves(call, [pieces[rank] for pieces in operands]) for rank in range(n)]
    computed = [
        list(tensors_of(_seeded(call, local, seed, strategy, (n, rank))))
        for rank, local in enumerate(ranks)
    ]
    values = (*_values(call), *call.results)
    steps = [torch.finfo(value.dtype).eps for value in values if is_floating(value)]
    tolerance = max([TOLERANCE, *(1e3 * step for step in steps)])  # some dtypes are below double
    wrong = f"of {strategy} differs from the whole"
    for place, placement in enumerate(strategy.outputs):
        parts = [results[place] for results in computed]
        if not agrees(parts, placement, whole[place], tolerance):
            yield f"result {place} {wrong}"
            return
    incoming = [size * torch.randn_like(x) if x.requires_grad else None for x in whole]
    gradients = _gradients(whole, leaves, incoming)
    incoming_parts = [
        [None] * n if gradient is None else dealt(gradient, _dual(placement), n)
        for gradient, placement in zip(incoming, strategy.outputs, strict=True)
    ]
    locally = [
        _gradients(computed[rank], ranks[rank], [parts[rank] for parts in incoming_parts])
        for rank in range(n)
    ]
    for place, (gradient, placement) in enumerate(zip(gradients, strategy.inputs, strict=True)):
        parts = [part for local in locally if (part := local[place]) is not None]
        if gradient is not None and not agrees(parts, _dual(placement), gradient, tolerance):
            yield f"gradient of operand {place} {wrong}"


def attempt(call: NodeCall, inputs: Sequence[Placement], n: int) -> list[list[torch.Tensor]]:
    """The results on every rank of the plain operator on operands of these types."""
    strategy = Strategy(tuple(inputs), ())
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        operands = [dealt(v, t, n) for v, t in zip(_values(call), inputs, strict=True)]
        return [
            list(tensors_of(run(call, [x[rank] for x in operands], strategy, (n, rank))))
            for rank in range(n)
        ]


def dealt(value: torch.Tensor, placement: Placement, n: int) -> list[torch.Tensor]:
    """The part of a value on each rank: the whole, a piece, or a random summand of its
    magnitude."""
    if placement.kind == "S":
        return [take(value, placement, n, rank).clone() for rank in range(n)]
    if placement.kind == "P":
        largest = max(1.0, value.abs().max().item()) if value.numel() else 1.0
        summands = [largest * torch.randn_like(value) for _ in range(n - 1)]
        return [*summands, value - torch.stack(summands).sum(0)]
    return [value.clone() for _ in range(n)]


def agrees(
    parts: Values, placement: Placement, whole: torch.Tensor, tolerance: float = TOLERANCE
) -> bool:
    """Whether the parts of the ranks, combined by type, equal the whole."""
    if placement.kind == "S":
        return _same(join(parts, placement), whole, tolerance)
    if placement.kind == "P":
        return _same(torch.stack(list(parts)).sum(0), whole, tolerance)
    return all(_same(part, whole, tolerance) for part in parts)


def _dual(placement: Placement) -> Placement:
    """The placement of a value's gradient: summands for R, whole for P."""
    return {R: P, P: I, I: I}.get(placement, placement)


def _same(part: torch.Tensor, whole: torch.Tensor, tolerance: float) -> bool:
    if part.shape != whole.shape:
        return False
    if not is_floating(whole):
        return torch.equal(part.to(whole.dtype), whole)
    return torch.allclose(part, whole, rtol=tolerance, atol=tolerance, equal_nan=True)


def _values(call: NodeCall) -> list[torch.Tensor]:
    return [operand.value for operand in call.operands]


def _leaves(call: NodeCall, values: Values) -> list[torch.Tensor]:
    return [
        value.detach().clone().requires_grad_(carries)
        for value, carries in zip(values, call.gradients, strict=True)
    ]


def _gradients(
    results: Values, leaves: Values, incoming: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """The gradients of the leaves that have one, from those of the results."""
    pairs = zip(results, incoming, strict=True)
    coming = [(result, gradient) for result, gradient in pairs if gradient is not None]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not coming or not wanted:
        return [None] * len(leaves)
    roots, seeds = zip(*coming, strict=True)
    gradients = iter(torch.autograd.grad(roots, wanted, seeds, materialize_grads=True))
    return [next(gradients) if leaf.requires_grad else None for leaf in leaves]


def _seeded(
    call: NodeCall,
    leaves: Values,
    seed: int,
    strategy: Strategy | None = None,
    place: tuple[int, int] = (1, 0),
) -> Any:
    """The call with copies of the leaves (it may update them in place), drawing by `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return run(call, [leaf.clone() for leaf in leaves], strategy, place)


def run(
    call: NodeCall,
    values: Values,
    strategy: Strategy | None = None,
    place: tuple[int, int] = (1, 0),
) -> Any:
    """The call on whole values; with a strategy, on the values of one rank; `place` is (n,
    rank)."""
    (n, rank), sizes = place, strategy.sizes if strategy else ()
    arguments = localized(call.filled(values), sizes, lambda whole: piece(whole, n, rank).size)
    args, kwargs = call.passed(arguments)
    assert callable(call.node.target), "a function"
    result = call.node.target(*args, **kwargs)
    if strategy is None or strategy.factor == 1.0:
        return result
    return pytree.tree_map(lambda leaf: leaf * strategy.factor, result)
