"""The product of the last layer with the table of the vocabulary, however it is written.

linear(x, W, b)   matmul(x, Wᵀ)   mm(x, Wᵀ)   addmm(b, x, Wᵀ)   einsum("bsh,vh->bsv", x, W)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from parcompiler.graph import Graph, Parameter, shape_of
from parcompiler.vocabulary.found import Row
from parcompiler.vocabulary.reading import arguments, name_of, source, turned


@dataclass(frozen=True, slots=True)
class Product:
    """x Wᵀ for a parameter W [V, h]: `dim` is the dimension of V in the result.

    `rows` bring the dimension of h in x there. A product with a parameter [h, V] has no `dim`.
    """

    node: fx.Node
    x: fx.Node
    weight: Parameter
    dim: int | None
    bias: fx.Node | None = None
    rows: tuple[Row, ...] = ()


def product(graph: Graph, node: fx.Node) -> Product | None:
    """The product that a node is; None when it is something else."""
    match name_of(node):
        case "linear":
            given = arguments(node)
            return _product(graph, node, given["input"], given["weight"], bias=given["bias"])
        case "matmul" | "mm":
            first, second = node.args[:2]
            return _product(graph, node, first, second, turn=True)
        case "addmm":
            given = arguments(node)
            plain = given["beta"] == given["alpha"] == 1
            if not plain:
                return None
            return _product(
                graph, node, given["mat1"], given["mat2"], bias=given["self"], turn=True
            )
        case "einsum":
            return _einsum(graph, node)
    return None


def _product(
    graph: Graph,
    node: fx.Node,
    x: object,
    table: object,
    *,
    bias: object = None,
    turn: bool = False,
) -> Product | None:
    """x times a table, which is [h, V] here where `turn`."""
    if not isinstance(x, fx.Node) or not isinstance(table, fx.Node):
        return None
    matrix = turned(table)
    as_rows = (matrix is not None) == turn  # a [V, h] in the model
    known = graph.by_node.get((source(table) if matrix is None else matrix).name)
    if known is None or len(known.shape) != 2:
        return None
    dim = len(shape_of(node)) - 1 if as_rows else None
    return Product(node, x, known, dim, bias if isinstance(bias, fx.Node) else None)


def _einsum(graph: Graph, node: fx.Node) -> Product | None:
    """A product of two, one of which is the table: no other letters are summed."""
    equation, operands = node.args[0], node.args[1]
    if not isinstance(equation, str) or not isinstance(operands, list | tuple):
        return None
    left, _, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != 2 or len(operands) != 2 or "." in equation or not result:
        return None
    for place in (1, 0):
        table, x = operands[place], operands[1 - place]
        own, other = terms[place], terms[1 - place]
        assert isinstance(table, fx.Node)
        assert isinstance(x, fx.Node)
        known = graph.by_node.get(source(table).name)
        if known is None or len(own) != 2:
            continue
        new = [letter for letter in own if letter in result and letter not in other]
        summed = [letter for letter in own if letter in other and letter not in result]
        if len(new) != 1 or len(summed) != 1:
            continue
        if sorted(result.replace(new[0], summed[0])) != sorted(other):
            continue
        order = [other.index(summed[0] if letter == new[0] else letter) for letter in result]
        moved = Row(node, torch.ops.aten.permute.default, (order,))
        rows = () if order == list(range(len(order))) else (moved,)
        dim = result.index(new[0]) if own[0] == new[0] else None
        return Product(node, x, known, dim, rows=rows)
    return None
