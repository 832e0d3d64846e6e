"""Rules of operators that regroup dimensions: view, flatten, squeeze, expand, repeat, permute.

A group of dimensions that becomes another one splits at the outermost dimension of both, where
their pieces are the same elements: [batch, sequence, heads · size] -> [batch, sequence, heads,
size] splits the last dimension in pieces of whole heads.

>>> grouped((2, 12, 48), (2, 12, 4, 12))
(['g0', 'g1', 'g2'], ['g0', 'g1', 'g2', '1'])
>>> grouped((4, 1, 6), (24, 1))
(['g0', '1', '1'], ['g0', '1'])
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from torch import fx

from parcompiler.capture.effects import arguments_of, name_of
from parcompiler.graph import shape_of
from parcompiler.spmd.call import NodeCall
from parcompiler.spmd.dimensions import formula, words
from parcompiler.spmd.formula import Family, Rule
from parcompiler.spmd.strategy import SizeArgument

# The argument of each view with its sizes.
SIZE_ARGUMENTS = {"view": "size", "reshape": "shape", "_unsafe_view": "size", "unflatten": "sizes"}
RESHAPES = (*SIZE_ARGUMENTS, "flatten", "squeeze", "unsqueeze", "ravel")


def grouped(before: Sequence[int], after: Sequence[int]) -> tuple[list[str], list[str]]:
    """The words of two shapes with the same elements in the same order."""
    left, right = ["1"] * len(before), ["1"] * len(after)
    for number, (first, second) in enumerate(_heads(before, after)):
        left[first] = right[second] = f"g{number}"
    return left, right


def _heads(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The outermost dimensions of each pair of groups of the same number of elements."""
    if 0 in before:
        return
    left = [dim for dim, size in enumerate(before) if size > 1]
    right = [dim for dim, size in enumerate(after) if size > 1]
    while left:
        yield left[0], right[0]
        before_dims, after_dims = [left.pop(0)], [right.pop(0)]
        while (a := prod(before[dim] for dim in before_dims)) != (
            b := prod(after[dim] for dim in after_dims)
        ):
            if a < b:
                before_dims.append(left.pop(0))
            else:
                after_dims.append(right.pop(0))


def view(call: NodeCall) -> Rule | None:
    """A view by sizes, or an equivalent (flatten, squeeze, unsqueeze)."""
    if len(call.operands) != 1 or call.overload == "dtype":
        return None
    (before,), (after,) = call.shapes, call.result_shapes
    left, right = grouped(before, after)
    sizes: tuple[tuple[str, SizeArgument], ...] = ()
    argument = SIZE_ARGUMENTS.get(call.base)
    if argument:
        offset = call.arguments["dim"] % len(before) if argument == "sizes" else 0
        sizes = tuple(_sizes(argument, call.arguments[argument], right[offset:], after[offset:]))
    # A piece of one element would be squeezed away.
    return Rule(formula([left], [right]), sizes, least=2 if call.base == "squeeze" else 1)


def _sizes(
    argument: str, sizes: Sequence[object], names: Sequence[str], shape: Sequence[int]
) -> Iterator[tuple[str, SizeArgument]]:
    """The entries of a list of sizes that are split with a word; -1 needs no change."""
    for place, (size, word, whole) in enumerate(zip(sizes, names, shape, strict=False)):
        if size != -1 and word != "1":
            yield word, SizeArgument(argument, place, whole)


def expand(call: NodeCall) -> Rule | None:
    """expand: a dimension that is stretched may be split where the operand is whole."""
    if len(call.operands) != 1:
        return None
    (before,), (after,) = call.shapes, call.result_shapes
    right = words(len(after))
    left = right[len(after) - len(before) :]
    sizes = tuple(_sizes("size", call.arguments["size"], right, after))
    return Rule(formula([left], [right]), sizes)


def repeat(call: NodeCall) -> Rule | None:
    """repeat: an unrepeated dimension splits with its operand, a repeated one by copies."""
    (before,), (after,) = call.shapes, call.result_shapes
    repeats = call.arguments["repeats"]
    if not all(isinstance(number, int) for number in repeats):
        return None
    offset = len(after) - len(before)
    right, left, sizes = words(len(after)), ["1"] * len(before), []
    for dim, number in enumerate(repeats):
        if number == 1 and dim >= offset:
            left[dim - offset] = right[dim]
        elif dim >= offset and before[dim - offset] > 1:
            right[dim] = "1"
        else:
            sizes.append((right[dim], SizeArgument("repeats", dim, number)))
    return Rule(formula([left], [right]), tuple(sizes))


def repeat_interleave(call: NodeCall) -> Rule | None:
    """repeat_interleave by a number: copies stay with their element."""
    if call.overload != "self_int" or len(call.shapes[0]) != len(call.result_shapes[0]):
        return None
    rank, dim = len(call.shapes[0]), call.arguments.get("dim")
    listed, sizes = words(rank), []
    if isinstance(dim, int):
        word, whole = listed[dim % rank], call.result_shapes[0][dim % rank]
        if call.arguments.get("output_size") is not None:
            sizes.append((word, SizeArgument("output_size", None, whole)))
        if call.shapes[0][dim % rank] == 1:  # nothing but copies
            sizes.append((word, SizeArgument("repeats", None, whole)))
    return Rule(formula([listed], [listed]), tuple(sizes))


def permutation(node: fx.Node) -> list[int] | None:
    """The permutation that a node applies to the dimensions of its operand; None for other nodes.

    >>> import torch
    >>> x = fx.Graph().placeholder("x")
    >>> x.meta["val"] = torch.empty(2, 3, 4)
    >>> permutation(x.graph.call_function(torch.ops.aten.swapaxes.default, (x, 1, -1)))
    [0, 2, 1]
    """
    name = name_of(node).removesuffix("_")
    if name not in PERMUTING:
        return None
    arguments, rank = arguments_of(node), len(shape_of(node.all_input_nodes[0]))
    order = list(range(rank))
    if name == "permute":
        return [dim % rank for dim in arguments["dims"]]
    if name in ("t", "numpy_T"):
        return order[::-1]
    if rank:
        first, second = (arguments.get(dim, dim) for dim in _SWAPS[name])
        order[first], order[second] = order[second], order[first]
    return order


# The swapped dimensions: arguments that name them, or the last two.
_SWAPS: Mapping[str, tuple[Any, Any]] = {
    **dict.fromkeys(("transpose", "swapdims"), ("dim0", "dim1")),
    "swapaxes": ("axis0", "axis1"),
    **dict.fromkeys(("mT", "adjoint", "matrix_H"), (-2, -1)),
}
PERMUTING = ("permute", "t", "numpy_T", *_SWAPS)


def permute(call: NodeCall) -> Rule | None:
    """Dimensions in another order."""
    listed = words(len(call.shapes[0]))
    return Rule(formula([listed], [[listed[dim] for dim in permutation(call.node) or ()]]))


RULES: dict[str, str | Family] = {
    **dict.fromkeys(RESHAPES, view),
    **dict.fromkeys(PERMUTING, permute),
    "expand": expand,
    "repeat": repeat,
    "repeat_interleave": repeat_interleave,
}
