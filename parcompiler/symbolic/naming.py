"""The sizes that are the model's own, named: so that a closed form reads as in a textbook.

| letter | is                                                                          |
|--------|-----------------------------------------------------------------------------|
| h      | the hidden size: the width of the largest embedding, else the commonest     |
|        | dimension of matrices                                                       |
| V      | the vocabulary: the rows of that embedding                                  |
| f      | the next commonest dimension of matrices, where it is no multiple of h      |

They are numbers of the captured model, and do not change. A coefficient is written with the largest
product of them that divides it: what it is worth stays the same.

>>> split(Fraction(24 * 4096**2), {"h": 4096, "V": 50257})
(Fraction(24, 1), ('h', 'h'))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from math import prod

from parcompiler.graph import Block, Graph

PRODUCTS = ((), ("h",), ("V",), ("f",), ("h", "h"), ("h", "V"), ("h", "f"))
LEAST = 16  # smaller numbers are no names' worth


def names_of(graph: Graph) -> dict[str, int]:
    """The named sizes of a model (the whole one)."""
    tables = [item.shape for item in graph.parameters if item.node in _looked_up(graph)]
    matrices = [item.shape for item in graph.parameters if len(item.shape) == 2]
    counted = Counter(dim for shape in matrices for dim in shape if dim >= LEAST)
    found: dict[str, int] = {}
    if tables:
        rows, width = max(tables)
        found |= {"h": width, "V": rows}
    elif counted:
        found["h"] = counted.most_common(1)[0][0]
    for dim, _ in counted.most_common():
        if found and dim not in found.values() and dim % found["h"]:
            found["f"] = dim
            break
    kept = {letter: number for letter, number in found.items() if number >= LEAST}
    return kept if "h" in kept else {}


def of_block(names: Mapping[str, int], block: Block, graph: Graph) -> dict[str, int]:
    """The named sizes that tensors of a block have, of h and f also multiples."""
    shapes = (graph.by_name[binding.name].whole.shape for binding in block.tensors)
    dims = {dim for shape in shapes for dim in shape}
    return {
        letter: number
        for letter, number in names.items()
        if number in dims or (letter != "V" and any(dim and dim % number == 0 for dim in dims))
    }


def split(number: Fraction, names: Mapping[str, int]) -> tuple[Fraction, tuple[str, ...]]:
    """A number as a factor and named sizes: the largest product that divides it."""
    products = {
        letters: prod(names[letter] for letter in letters)
        for letters in PRODUCTS
        if all(letter in names for letter in letters)
    }
    fitting = (
        letters for letters, size in products.items() if number.numerator % size == 0 or not letters
    )
    best = max(fitting, key=lambda letters: products[letters])
    return number / products[best], best


def _looked_up(graph: Graph) -> set[str]:
    """The placeholders of the matrices that embeddings read."""
    return {
        operand.name
        for node in graph.fx_graph.nodes
        if "embedding" in str(node.target)
        for operand in node.all_input_nodes
        if operand.name in graph.by_node and len(graph.by_node[operand.name].shape) == 2
    }
