"""Names for sizes of the model itself, so that a formula reads as in a textbook.

| letter | is                                                                          |
|--------|-----------------------------------------------------------------------------|
| h      | the hidden size: the width of the largest embedding, else the commonest     |
|        | dimension of matrices                                                       |
| V      | the vocabulary: the rows of that embedding                                  |
| f      | the next commonest dimension of matrices, where it is no multiple of h      |

They are fixed numbers of the captured model. A coefficient is written with the largest product of
them that divides it, which does not change its value.

>>> named(Fraction(24 * 4096**2), {"h": 4096, "V": 50257})
24*h**2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING

from parcompiler.graph import Block, Graph

if TYPE_CHECKING:  # sympy takes 0.3 s to import: only when forms are used
    import sympy

PRODUCTS = ((), ("h",), ("V",), ("f",), ("h", "h"), ("h", "V"), ("h", "f"))
LEAST = 16  # smaller numbers get no name


def names_of(graph: Graph) -> dict[str, int]:
    """The named sizes of a model (the whole one)."""
    tables = {
        operand.name
        for node in graph.fx_graph.nodes
        if "embedding" in str(node.target)
        for operand in node.all_input_nodes
    }
    matrices = [item for item in graph.parameters if len(item.shape) == 2]
    common = Counter(dim for item in matrices for dim in item.shape if dim >= LEAST)
    names: dict[str, int] = {}
    if largest := max((item.shape for item in matrices if item.node in tables), default=None):
        names = {"h": largest[1], "V": largest[0]}
    elif common:
        names = {"h": common.most_common(1)[0][0]}
    for dim, _ in common.most_common():
        if names and dim not in names.values() and dim % names["h"]:
            names["f"] = dim
            break
    names = {letter: number for letter, number in names.items() if number >= LEAST}
    return names if "h" in names else {}


def names_in(names: Mapping[str, int], block: Block, graph: Graph) -> dict[str, int]:
    """The named sizes that tensors of a block have, or multiples of h and f."""
    dims = {dim for binding in block.tensors for dim in graph.by_name[binding.name].whole.shape}
    return {
        letter: number
        for letter, number in names.items()
        if number in dims or (letter != "V" and any(dim and dim % number == 0 for dim in dims))
    }


def named(number: Fraction, names: Mapping[str, int]) -> sympy.Expr:
    """A coefficient with the largest product of named sizes that divides it."""
    import sympy

    products = {
        letters: prod(names[letter] for letter in letters)
        for letters in PRODUCTS
        if names.keys() >= {*letters}
    }
    dividing = [letters for letters, size in products.items() if number.numerator % size == 0]
    best = max(dividing, key=products.__getitem__)
    return sympy.Rational(number / products[best]) * sympy.Mul(*map(symbol, best))


def symbol(letter: str) -> sympy.Symbol:
    """The symbol of a size."""
    import sympy

    return sympy.Symbol(letter, integer=True, positive=True)
