"""A strategy carried out on simulated ranks, and compared with the operator on the whole.

Every rank computes with the operands and gets the gradients that the types say; put together by
type, values and gradients must be those of the whole.

>>> from parcompiler.spmd.placement import P, R, S
>>> call = example(torch.ops.aten.mm.default, torch.ones(2, 4).double(), torch.ones(4, 3).double())
>>> faults(call, Strategy((S(1), S(0)), (P,)), n=2)
()
>>> faults(call, Strategy((S(1), S(0)), (R,)), n=2)[0]
'result 0 of S(1) S(0) -> R differs from the whole'
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from parcompiler.pieces import Span, piece
from parcompiler.spmd.call import OperatorCall, Shape, is_floating, read
from parcompiler.spmd.elementwise import REDUCTION_SUM
from parcompiler.spmd.placement import I, P, Placement, R, join, take
from parcompiler.spmd.strategy import Strategy, localized

Values = Sequence[torch.Tensor]
TOLERANCE = 1e-9


def example(target: Callable[..., Any], *args: Any, **kwargs: Any) -> OperatorCall:
    """A call of an operator on real tensors, as the node of a graph would be read.

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
        node.meta["val"] = _run(read(node), [x.clone() for x in _values(read(node))])
    return read(node, {*carrying, node.name} if carrying else None)


def faults(call: OperatorCall, strategy: Strategy, n: int, seed: int = 0) -> tuple[str, ...]:
    """What goes wrong with a strategy on the values of `call`: nothing when it is right.

    Strategies that exchange something inside, or draw other numbers on each rank, have none.
    """
    if strategy.draws == "own" or strategy.special not in ("", *LOCAL):
        return ()
    with torch.random.fork_rng(devices=[]):  # torch.manual_seed would seed other devices for good
        torch.default_generator.manual_seed(seed)
        return tuple(_faults(call, strategy, n))


def _faults(call: OperatorCall, strategy: Strategy, n: int) -> Iterator[str]:
    """Values first, then gradients."""
    seed = int(torch.randint(1 << 30, ()))
    leaves = _leaves(call, _values(call))
    whole = _results(_seeded(call, leaves, seed))
    operands = [dealt(v, t, n) for v, t in zip(_values(call), strategy.inputs, strict=True)]
    ranks = [_leaves(call, [pieces[rank] for pieces in operands]) for rank in range(n)]
    computed = [
        _results(_seeded(call, local, seed, strategy, (n, rank)))
        for rank, local in enumerate(ranks)
    ]
    tolerance = _tolerance(call)
    wrong = f"of {strategy} differs from the whole"
    for place, placement in enumerate(strategy.outputs):
        parts = [results[place] for results in computed]
        if not agrees(parts, placement, whole[place], tolerance):
            yield f"result {place} {wrong}"
            return
    incoming = [torch.randn_like(result) if result.requires_grad else None for result in whole]
    gradients = _gradients(whole, leaves, incoming)
    given = [
        [None] * n if gradient is None else dealt(gradient, _dual(placement), n)
        for gradient, placement in zip(incoming, strategy.outputs, strict=True)
    ]
    locally = [
        _gradients(computed[rank], ranks[rank], [parts[rank] for parts in given])
        for rank in range(n)
    ]
    for place, (gradient, placement) in enumerate(zip(gradients, strategy.inputs, strict=True)):
        parts = [part for local in locally if (part := local[place]) is not None]
        if gradient is not None and not agrees(parts, _dual(placement), gradient, tolerance):
            yield f"gradient of operand {place} {wrong}"


def _tolerance(call: OperatorCall) -> float:
    """More where a call computes in less than double precision."""
    values = [*_values(call), *call.results]
    steps = [torch.finfo(value.dtype).eps for value in values if is_floating(value)]
    return max([TOLERANCE, *(1e3 * step for step in steps)])


def attempt(call: OperatorCall, inputs: Sequence[Placement], n: int) -> list[list[torch.Tensor]]:
    """The results on every rank of the plain operator on operands of these types."""
    strategy = Strategy(tuple(inputs), ())
    operands = [dealt(v, t, n) for v, t in zip(_values(call), inputs, strict=True)]
    with torch.no_grad():
        return [
            _results(_run(call, [pieces[rank] for pieces in operands], strategy, (n, rank)))
            for rank in range(n)
        ]


def dealt(value: torch.Tensor, placement: Placement, n: int) -> list[torch.Tensor]:
    """What each rank holds of a value: the whole, its piece, or a random summand."""
    if placement.kind == "S":
        return [take(value, placement, n, rank).clone() for rank in range(n)]
    if placement.kind == "P":
        summands = [torch.randn_like(value) for _ in range(n - 1)]
        return [*summands, value - torch.stack(summands).sum(0)]
    return [value.clone() for _ in range(n)]


def agrees(
    parts: Values, placement: Placement, whole: torch.Tensor, tolerance: float = TOLERANCE
) -> bool:
    """Whether what ranks hold is the whole when it is put together by type."""
    if placement.kind == "S":
        return _same(join(parts, placement), whole, tolerance)
    if placement.kind == "P":
        return _same(torch.stack(list(parts)).sum(0), whole, tolerance)
    return all(_same(part, whole, tolerance) for part in parts)


def _dual(placement: Placement) -> Placement:
    """How the gradient of a value stands: in summands for R, whole for P."""
    return {R: P, P: I, I: I}.get(placement, placement)


def _same(part: torch.Tensor, whole: torch.Tensor, tolerance: float) -> bool:
    if part.shape != whole.shape:
        return False
    if not is_floating(whole):
        return torch.equal(part.to(whole.dtype), whole)
    return torch.allclose(part, whole, rtol=tolerance, atol=tolerance, equal_nan=True)


def _values(call: OperatorCall) -> list[torch.Tensor]:
    return [operand.value for operand in call.operands]


def _leaves(call: OperatorCall, values: Values) -> list[torch.Tensor]:
    return [
        value.detach().clone().requires_grad_(carries)
        for value, carries in zip(values, call.gradients, strict=True)
    ]


def _gradients(
    results: Values, leaves: Values, incoming: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """The gradients of the leaves that have one, from those that come to the results."""
    pairs = zip(results, incoming, strict=True)
    coming = [(result, gradient) for result, gradient in pairs if gradient is not None]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not coming or not wanted:
        return [None] * len(leaves)
    roots, given = zip(*coming, strict=True)
    gradients = iter(torch.autograd.grad(roots, wanted, given, materialize_grads=True))
    return [next(gradients) if leaf.requires_grad else None for leaf in leaves]


def _results(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _seeded(
    call: OperatorCall,
    leaves: Values,
    seed: int,
    strategy: Strategy | None = None,
    place: tuple[int, int] = (1, 0),
) -> Any:
    """The call with copies of the leaves (it may update them in place), drawing by `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return _run(call, [leaf.clone() for leaf in leaves], strategy, place)


def _run(
    call: OperatorCall,
    values: Values,
    strategy: Strategy | None = None,
    place: tuple[int, int] = (1, 0),
) -> Any:
    """The call on whole values; with a strategy, on what one rank (`n`, `rank`) holds."""
    arguments = _filled(call, values)
    if strategy is None:
        return _invoke(call.node.target, arguments)
    n, rank = place
    arguments = localized(arguments, strategy.sizes, lambda whole: piece(whole, n, rank).size)
    if strategy.special:
        assert callable(call.node.target), f"{call.name} is no function"
        rank_call = RankCall(call.node.target, arguments, call.shapes, n, rank)
        return LOCAL[strategy.special](rank_call)
    result = _invoke(call.node.target, arguments)
    if strategy.factor == 1.0:
        return result
    return pytree.tree_map(lambda leaf: leaf * strategy.factor, result)


def _filled(call: OperatorCall, values: Values) -> dict[str, Any]:
    """The arguments with values for operands."""
    by_place = {
        (operand.argument, operand.index): value
        for operand, value in zip(call.operands, values, strict=True)
    }
    filled: dict[str, Any] = {}
    for name, value in call.arguments.items():
        if isinstance(value, list | tuple):
            filled[name] = [by_place.get((name, i), item) for i, item in enumerate(value)]
        else:
            filled[name] = by_place.get((name, None), value)
    return filled


def _invoke(target: Any, arguments: Mapping[str, Any]) -> Any:
    """Call an operator with arguments by name, or a function with those by number."""
    if not isinstance(target, torch._ops.OpOverload):
        placed = [value for name, value in arguments.items() if name.isdigit()]
        return target(*placed, **{k: v for k, v in arguments.items() if not k.isdigit()})
    named = {argument.name for argument in target._schema.arguments if argument.kwarg_only}
    placed = [value for name, value in arguments.items() if name not in named]
    return target(*placed, **{name: arguments[name] for name in named if name in arguments})


class RankCall(NamedTuple):
    """A call on one of `n` ranks: `arguments` are local, `shapes` those of the whole operands."""

    target: Callable[..., Any]
    arguments: Mapping[str, Any]
    shapes: Sequence[Shape]
    n: int
    rank: int

    def piece(self, operand: int, dim: int) -> Span:
        """The rank's piece of a dimension of an operand."""
        return piece(self.shapes[operand][dim], self.n, self.rank)

    def rows(self) -> tuple[Span, torch.Tensor, torch.Tensor]:
        """The rank's rows of a table, where indices stand in them, and which are inside."""
        span = self.piece(0, 0)
        position = self.arguments["indices"] - span.start
        inside = (position >= 0) & (position < span.size)
        return span, position.where(inside, 0), inside


def _embedding(call: RankCall) -> torch.Tensor:
    """The rows that this rank has; zero for the others."""
    span, position, inside = call.rows()
    padding = call.arguments["padding_idx"] - span.start
    padding = padding if 0 <= padding < span.size else -1
    rows: torch.Tensor = call.target(call.arguments["weight"], position, padding)
    return rows.masked_fill(~inside.unsqueeze(-1), 0)


def _bags(call: RankCall) -> Any:
    """The sums of the rows that this rank has."""
    _, position, inside = call.rows()
    weights = inside.to(call.arguments["weight"].dtype)
    return call.target(**{**call.arguments, "indices": position, "per_sample_weights": weights})


def _loss_of_rows(call: RankCall) -> torch.Tensor:
    """The sum over this rank's rows, divided by what the rows of all ranks weigh."""
    span, classes, weight = call.piece(0, 0), call.arguments["target"], call.arguments["weight"]
    counts = classes != call.arguments["ignore_index"]
    each = counts if weight is None else weight[classes.where(counts, 0)].masked_fill(~counts, 0)
    rows = classes[span.start : span.start + span.size]
    total: torch.Tensor = call.target(
        **{**call.arguments, "target": rows, "reduction": REDUCTION_SUM}
    )
    mean: torch.Tensor = total / each.sum()
    return mean


def _heads(call: RankCall) -> Any:
    """Attention of this rank's heads, each with the keys and values that it shares."""
    span, keys = call.piece(0, -3), call.arguments["key"]
    group = call.shapes[0][-3] // call.shapes[1][-3]
    partner = torch.arange(span.start, span.start + span.size, device=keys.device) // group
    local = {name: call.arguments[name].index_select(-3, partner) for name in ("key", "value")}
    return call.target(**{**call.arguments, **local, "enable_gqa": False})


def _experts(call: RankCall) -> torch.Tensor:
    """The rows of this rank's experts; zero for the others."""
    rows, weight, ends = list(call.arguments.values())[:3]
    span = call.piece(1, 0)
    first = int(ends[span.start - 1]) if span.start else 0
    last = int(ends[span.start + span.size - 1])
    product = call.target(
        rows[first:last], weight, ends[span.start : span.start + span.size] - first
    )
    return F.pad(product, (0, 0, first, rows.shape[0] - last))


# The special strategies (see `special`) that need no collective.
LOCAL: Mapping[str, Callable[[RankCall], Any]] = {
    "vocabulary lookup": _embedding,
    "vocabulary bags": _bags,
    "own rows": _loss_of_rows,
    "own heads": _heads,
    "own experts": _experts,
}
