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
>>> source(node, 4)
'written'
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Literal

import torch  # noqa: F401  (of the example above)
from torch import fx

from parcompiler.spmd import along, elementwise, indexing, losses, matrix, neural, parts, views
from parcompiler.spmd.call import Call, read
from parcompiler.spmd.discover import discovered
from parcompiler.spmd.rule import Rule, Segments, expand, is_sound, replicated
from parcompiler.spmd.segments import taken_apart
from parcompiler.spmd.special import special
from parcompiler.spmd.strategy import Size, Strategy

Source = Literal["written", "discovered", "replicated"]
Family = Callable[[Call], Rule | None]

LINES: Mapping[str, str] = {**elementwise.LINES, **matrix.LINES, **neural.LINES}
FAMILIES: Mapping[str, Family] = {
    **elementwise.FAMILIES,
    **along.FAMILIES,
    **views.FAMILIES,
    **parts.FAMILIES,
    **matrix.FAMILIES,
    **neural.FAMILIES,
    **indexing.FAMILIES,
    **losses.FAMILIES,
}
# Their operands are shapes alone, or nothing: every rank makes the whole, or its piece.
MAKERS = frozenset("zeros ones full empty new_zeros new_ones new_full new_empty".split())


def strategies(
    node: fx.Node,
    n: int,
    *,
    differentiable: Container[str] | None = None,
    uneven: bool = True,
    segments: Sequence[Segments] = (),
) -> tuple[Strategy, ...]:
    """All strategies of a node with `meta["val"]` on `n` ranks, replicated ones first.

    `differentiable` are the names of the nodes that carry gradients (`Graph.differentiable`; all
    floating ones when it is not given). `uneven` allows pieces that differ by an element, for
    dimensions that `n` does not divide. `segments` are divisions of dimensions that may be split
    within each segment (`segments.segmentations` finds those that a graph makes). The one input of
    an item of several results is that result.
    """
    call = read(node, differentiable)
    if n == 1 or not call.is_plain:
        return replicated(call)
    rule = written(call)
    found = [*replicated(call)]
    if rule is not None:
        found += expand(rule, call, n, uneven=uneven, segments=segments)
    elif is_unknown(call):
        found += discovered(call, n)
    found += special(call, n, uneven=uneven)
    found += taken_apart(call, n, segments)
    return tuple(strategy for strategy in dict.fromkeys(found) if is_sound(strategy, call))


def source(node: fx.Node, n: int) -> Source:
    """Where the strategies of a node come from; "replicated" when there are no others."""
    call = read(node)
    found = strategies(node, n)
    if is_unknown(call) and not all(strategy.is_replicated for strategy in found):
        return "discovered"
    return "replicated" if is_unknown(call) or written(call) is None else "written"


def is_unknown(call: Call) -> bool:
    """Whether no rule is written for an operator."""
    return not (call.base in LINES or call.base in FAMILIES or call.base in MAKERS or call.is_item)


def written(call: Call) -> Rule | None:
    """The written rule of a call; None where there is none, or none for such arguments."""
    if call.is_item:
        return Rule("*x -> *x")
    if call.base in LINES:
        return Rule(LINES[call.base])
    if call.base in MAKERS:
        return made(call)
    return FAMILIES[call.base](call) if call.base in FAMILIES else None


def made(call: Call) -> Rule | None:
    """zeros, ones and the like: every rank makes its piece."""
    given = call.arguments["size"]
    shape = call.result_shapes[0]
    if not all(isinstance(size, int) for size in given):
        return None
    listed = along.words(len(shape))
    sizes = tuple((word, Size("size", dim, shape[dim])) for dim, word in enumerate(listed))
    return Rule(("!(*x)" if call.operands else "") + f" -> {' '.join(listed)}", sizes)
