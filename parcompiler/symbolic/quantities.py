"""What a block costs as a list of numbers: what polynomials are fitted to.

The largest memory that is alive at once is a maximum over moments, and so no polynomial: it is left
out (0), and so is what a backward in two parts leaves to the second. Of a table an operator reads
no more than there is: the smaller of the rows that it yields and the table (`Cap`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from parcompiler.cost import BlockCost, Operation
from parcompiler.cost.operation import label
from parcompiler.graph import Block, Graph
from parcompiler.spmd.runtime_call import RuntimeCall
from parcompiler.symbolic.fit import Number

TABLES = ("aten.embedding.default", "aten.index_select.default", "aten.index.Tensor")
LISTS = ("forward", "backward", "weight")
OMITTED = ("_peak", "deferred", "deferred_weights")  # the ends of names of fields


@dataclass(frozen=True, slots=True)
class Cap:
    """An operator moves, besides a polynomial, the smaller of what it yields and a table of
    `nbytes`. `moved` and `flops` are its places among the numbers; it yields as many elements of
    `itemsize` as FLOPs."""

    moved: int
    flops: int
    itemsize: int
    nbytes: int

    def of(self, values: Sequence[Number]) -> Number:
        """What it reads of the table."""
        return min(self.itemsize * values[self.flops], self.nbytes)


def caps(block: Block, cost: BlockCost, graph: Graph) -> tuple[Cap, ...]:
    """The operators of a block's forward that read tables: parameters and buffers."""
    found = []
    for name in TABLES:
        nodes = [node for node in block.nodes if _operator(node) == name]
        places = [k for k, operation in enumerate(cost.forward) if operation.name == name]
        if len(nodes) == len(places):
            for node, k in zip(nodes, places, strict=True):
                read = node.args[isinstance(node.target, RuntimeCall)]  # behind the indices there
                table = graph.by_node.get(str(read))
                if table is not None:
                    found.append(Cap(2 * k + 1, 2 * k, table.dtype.itemsize, table.nbytes))
    return tuple(found)


def _operator(node: fx.Node) -> str:
    """The operator that a node runs; looking up a rank's own rows is an embedding."""
    own = isinstance(node.target, RuntimeCall) and node.target.name == "embedding"
    return TABLES[0] if own else label(node.target)


def without(values: list[Number], tables: Sequence[Cap]) -> list[Number]:
    """The numbers without what is read of tables."""
    for cap in tables:
        values[cap.moved] -= cap.of(values)
    return values


def numbers(cost: BlockCost) -> list[Number]:
    """FLOPs and bytes of all operators, then the other numbers of a cost."""
    found: list[Number] = []
    for name in LISTS:
        for operation in getattr(cost, name):
            found += operation.flops, operation.nbytes
    return [*found, *(getattr(cost, name) for name in counted(cost))]


def kind(cost: BlockCost) -> object:
    """What is the same at all sizes: the operators, and which values are kept."""
    lists = tuple(tuple(map(_named, getattr(cost, name))) for name in LISTS)
    return lists, cost.estimated, cost.kept_inputs, cost.kept_outputs


def counted(cost: BlockCost) -> list[str]:
    """The fields that are numbers, without those that are omitted."""
    names = (field.name for field in dataclasses.fields(cost))
    return [n for n in names if isinstance(getattr(cost, n), int) and not n.endswith(OMITTED)]


def _named(operation: Operation) -> object:
    return operation.name, operation.kind, operation.dtype, operation.ranks
