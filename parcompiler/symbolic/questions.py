"""What the graph alone does not say of the numbers that were burnt into it, and who does.

A number may equal a size by chance, and a tensor may be made from a number that the model computed
from sizes in its Python (how many slots an expert has). Without more to go by both are refused; a
second capture at other sizes answers them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from parcompiler.graph import Graph
from parcompiler.spmd.call import bound
from parcompiler.symbolic.operators import Choice, unexplained
from parcompiler.symbolic.reading import Reading, Unfit
from parcompiler.symbolic.resize import Resizer, Run
from parcompiler.symbolic.sizes import Sizes

Again = Callable[[Sizes], Graph]  # a capture at these sizes
Differs = Callable[[Run], bool]


def settle(
    resizer: Resizer, known: Collection[int], again: Again | None, at: Sizes, differs: Differs
) -> None:
    """Answer what is open about a resizer that has settled. Raises Unfit where nothing answers.

    `known` are the sizes of all inputs, `at` those for a second capture; `differs` says of a run
    whether it costs something else.
    """
    strange = {node: number for node, choice in resizer.chosen.items()
               for number in unexplained(node, choice, known)}  # fmt: skip
    doubts: dict[fx.Node, list[Choice]] = {node: [] for node in strange}
    for node, choice, run in resizer.rivals():
        if differs(run):
            doubts.setdefault(node, []).append(choice)
    if doubts and again is not None:
        _ask(resizer, doubts, again(at), at)
        return
    fixed = set(_fixed(resizer))
    for node in doubts:
        if node in strange:
            message = (
                f"{node.name!r} makes a tensor from the number {strange[node]}, which may follow "
                "from other sizes"
            )
            raise Unfit(message)
        equal = sorted(size.now for size in resizer.sizes if size.now in fixed | {1})
        if equal:
            message = f"{node.name!r} may mean the size {equal[0]}, or a number of the model's own"
            raise Unfit(message)


def _fixed(resizer: Resizer) -> Iterator[int]:
    """The sizes of parameters, and the numbers that views have by themselves."""
    for item in resizer.graph.parameters:
        yield from item.shape
    for choice in resizer.chosen.values():
        for given in choice.values():
            for reading in given if isinstance(given, tuple) else (given,):
                if not reading.dims and not reading.letters:
                    yield int(reading.factor)


def _ask(resizer: Resizer, doubts: Mapping[fx.Node, list[Choice]], fresh: Graph, at: Sizes) -> None:
    """Take the reading that agrees with a second capture."""
    nodes = {node.name: node for node in fresh.fx_graph.nodes}
    for node, others in doubts.items():
        twin = nodes.get(node.name)
        if twin is None or twin.target is not node.target:
            message = f"{node.name!r} is another operator at other sizes"
            raise Unfit(message)
        choices = [resizer.chosen[node], *others]
        right = [choice for choice in choices if _agrees(choice, twin, at)]
        if not right:
            message = f"{node.name!r} makes a tensor from a number that is no multiple of sizes"
            raise Unfit(message)
        resizer.chosen[node] = right[0]


def _agrees(choice: Choice, twin: fx.Node, at: Sizes) -> bool:
    """Whether the numbers of a node are those that a choice says."""
    given = bound(twin.target, twin.args, twin.kwargs)  # type: ignore[arg-type]
    operands = twin.all_input_nodes
    value = operands[0].meta.get("val") if operands else None
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
    result = tuple(twin.meta["val"].shape)

    def same(item: Reading, number: Any) -> bool:
        return isinstance(number, int) and item.at(shape, at) == number

    for name, item in choice.items():
        if isinstance(item, Reading):
            if not same(item, given.get(name)):
                return False
        elif len(item) != len(result) or not all(map(same, item, result)):
            return False
    return True
