"""The strategies of an operator on the ranks of one axis: by its written rule, or discovered.

>>> from parcompiler.spmd.simulate import example
>>> x, weight = torch.ones(2, 6, 8), torch.ones(12, 8)
>>> node = example(torch.ops.aten.linear.default, x, weight).node
>>> for strategy in strategies(node, 4):
...     print(strategy)
I I -> I
R R -> R
S(1) R -> S(1)
S(2) S(1) -> P
R S(0) -> S(2)
P R -> P
R P -> P
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch  # noqa: F401  (of the example above)
from torch import fx

from parcompiler.spmd import context, dimensions, elementwise, indexing, layers, views
from parcompiler.spmd.call import NodeCall, read, written
from parcompiler.spmd.discover import discovered
from parcompiler.spmd.formula import Family, Rule, Segments, expand, replicated
from parcompiler.spmd.placement import I
from parcompiler.spmd.rows import Rows, sorted_by_ranks, zigzag
from parcompiler.spmd.runtime_call import RuntimeCall
from parcompiler.spmd.segments import segment_strategies
from parcompiler.spmd.special import special_strategies
from parcompiler.spmd.strategy import SizeArgument, Strategy


def maker(call: NodeCall) -> Rule | None:
    """zeros, ones and the like: every rank makes its piece."""
    shape = call.result_shapes[0]
    if not all(isinstance(size, int) for size in call.arguments["size"]):
        return None
    listed = dimensions.words(len(shape))
    sizes = ((word, SizeArgument("size", dim, shape[dim])) for dim, word in enumerate(listed))
    return Rule(("!(*x)" if call.operands else "") + f" -> {' '.join(listed)}", tuple(sizes))


MAKERS = "zeros ones full empty new_zeros new_ones new_full new_empty".split()
RULES: Mapping[str, str | Family] = {
    **elementwise.RULES,
    **dimensions.RULES,
    **views.RULES,
    **layers.RULES,
    **indexing.RULES,
    **dict.fromkeys(MAKERS, maker),
    **context.RULES,
}


def strategies(
    node: fx.Node,
    n: int,
    *,
    differentiable: Container[str] | None = None,
    segments: Sequence[Segments] = (),
    rows: Rows | None = None,
) -> tuple[Strategy, ...]:
    """All strategies of a node with `meta["val"]` on `n` ranks, replicated ones first.

    `differentiable` are the names of the nodes that carry gradients (`Graph.differentiable`; all
    floating ones when it is not given). Pieces of dimensions that `n` does not divide differ by an
    element. `segments` are divisions of dimensions that may be split within each segment
    (`segments.segmentations` finds those that a graph makes). The input of an item of several
    results is that result. On the context axis, where `rows` are given (see `rows`), every rank has
    a summand of any gradient that is not in pieces (`R`).
    """
    call = read(node, differentiable)
    if n == 1 or not call.is_plain:
        return replicated(call)
    rule = written_rule(call)
    possible = [*replicated(call)]
    if rule is not None:
        possible += expand(rule, call, n, segments=segments)
    elif is_unknown(call):
        possible += discovered(call, n)
    possible += special_strategies(call, n, segments=segments, rows=rows)
    possible += segment_strategies(call, n, segments)
    if node.meta.get("arriving"):  # rows whose number differs between expert ranks
        possible = [x for x in possible if all((o.kind, o.dim) != ("S", 0) for o in x.outputs)]
    if rows is not None:
        shapes = *call.shapes, *call.result_shapes
        dealt = (zigzag(x, shapes, rows, n) for x in possible if I not in x.types)
        possible = [x for x in dealt if x is not None]
        if item := rows.sorting.get(node):
            possible += sorted_by_ranks(item, shapes, segments, rows, n)
    updated = written(call)  # in place: such an operand has the type of its result
    return tuple(
        strategy
        for strategy in dict.fromkeys(possible)
        if not strategy.outputs
        or all(strategy.inputs[place] == strategy.outputs[0] for place in updated)
    )


def is_unknown(call: NodeCall) -> bool:
    """Whether no rule is written for an operator. Calls of the runtime are not tried, as they
    depend on other ranks."""
    of_runtime = isinstance(call.node.target, RuntimeCall)
    return call.base not in RULES and not call.is_item and not of_runtime


def written_rule(call: NodeCall) -> Rule | None:
    """The written rule of a call; None if there is none for it, or for these arguments."""
    if call.is_item:
        return Rule("*x -> *x")
    rule = RULES.get(call.base)
    return Rule(rule) if isinstance(rule, str) else rule(call) if rule is not None else None
