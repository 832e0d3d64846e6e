"""Rules of operators that work along some dimensions: softmax, sum, sort, split, slice, cat.

A dimension that an operator works along stays whole or, if the operator sums over it, leaves each
rank a summand; all others split. `segments` has the splits within parts of a dimension.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from parcompiler.spmd.call import NodeCall, Shape
from parcompiler.spmd.elementwise import nonlinear
from parcompiler.spmd.formula import Family, Rule
from parcompiler.spmd.strategy import SizeArgument


def words(rank: int, whole: Collection[int] = ()) -> list[str]:
    """A word for each of `rank` dimensions, `1` for those that stay whole.

    >>> words(3, whole=(1,))
    ['d0', '1', 'd2']
    """
    return ["1" if dim in whole else f"d{dim}" for dim in range(rank)]


def formula(operands: Sequence[Sequence[str]], results: Sequence[Sequence[str]]) -> str:
    """The formula with these words and a product of the operands."""
    sides = (", ".join(" ".join(listed) for listed in side) for side in (operands, results))
    return " -> ".join(sides)


def rank_of(call: NodeCall) -> int:
    """The largest number of dimensions of an operand or result."""
    return max(map(len, (*call.shapes, *call.result_shapes)), default=0)


def aligned(
    call: NodeCall,
    dims: Collection[int],
    *,
    linear: bool = False,
    summed: bool = False,
    means: bool = False,
    affine: bool = False,
) -> Rule | None:
    """The rule of operands and results that agree in all dimensions but `dims`, which some may
    lack.

    These stay whole, or are summed over (averaged, with `means`). Several operands are summands, as
    those of cat.
    """
    rank = rank_of(call)
    if len(set(map(len, call.shapes))) > 1:
        return None  # cat with an empty list among its operands

    def described(shape: Shape, whole: Collection[int]) -> str:
        listed = words(rank, whole)
        lacking = len(shape) < rank
        return " ".join(w for dim, w in enumerate(listed) if not (lacking and dim in dims))

    mark = "" if linear else "!"
    operands = [mark + described(shape, () if summed else dims) for shape in call.shapes]
    results = [described(shape, dims) for shape in call.result_shapes]
    averaged = frozenset(f"d{dim}" for dim in dims) if means else frozenset[str]()
    return Rule(f"{' + '.join(operands)} -> {', '.join(results)}", means=averaged, affine=affine)


def along(
    argument: str = "dim", *, linear: bool = False, summed: bool = False, means: bool = False
) -> Family:
    """The rule of operators that work along the dimensions that an argument names."""

    def rule(call: NodeCall) -> Rule | None:
        dims = call.dims(argument, rank_of(call))
        return aligned(call, dims, linear=linear, summed=summed, means=means)

    return rule


def extreme(call: NodeCall) -> Rule | None:
    """max and min: over a dimension, or of two tensors."""
    return nonlinear(call) if len(call.operands) == 2 else along()(call)


def triangle(call: NodeCall) -> Rule | None:
    """tril and triu: the matrices stay whole."""
    rank = rank_of(call)
    return aligned(call, (rank - 2, rank - 1), linear=True)


def pad(call: NodeCall) -> Rule | None:
    """The padded dimensions stay whole; with zeros, or values of the operand, it is linear."""
    rank, amounts = len(call.shapes[0]), call.arguments["pad"]
    if not all(isinstance(amount, int) for amount in amounts):
        return None
    constant = call.arguments.get("mode", "constant") == "constant"
    mirrored = range(rank - len(amounts) // 2, rank)
    dims = [dim for dim in mirrored if not constant or any(amounts[2 * (rank - 1 - dim) :][:2])]
    value = call.arguments.get("value")
    return aligned(call, dims, linear=True, affine=constant and value not in (None, 0))


def histc(call: NodeCall) -> Rule | None:
    """Counts of the pieces are summands, if the bins are given."""
    if not call.arguments["min"] < call.arguments["max"]:
        return None
    return Rule(f"!{' '.join(words(len(call.shapes[0])))} -> 1")


def weight_norm(call: NodeCall) -> Rule:
    """All but one dimension of the weight stays whole."""
    rank = len(call.shapes[0])
    dim = int(call.arguments.get("dim", 0)) % rank
    listed = ["c" if place == dim else "1" for place in range(rank)]
    direction, length = (" ".join(listed if len(s) == rank else ["(*x)"]) for s in call.shapes)
    return Rule(f"!{direction}, {length} -> {direction}")


def slice_(call: NodeCall) -> Rule | None:
    """The dimension stays whole unless all of it is taken."""
    rank = len(call.shapes[0])
    dim = int(call.arguments.get("dim", 0)) % rank
    size, end = call.shapes[0][dim], call.arguments.get("end")
    if call.result_shapes[0][dim] != size:
        return aligned(call, (dim,), linear=True)
    listed = words(rank)
    names_size = isinstance(end, int) and end == size
    sizes = ((listed[dim], SizeArgument("end", None, size)),) if names_size else ()
    return Rule(formula([listed], [listed]), sizes)


def unfold(call: NodeCall) -> Rule:
    """The dimension stays whole, and the windows are the last."""
    rank = len(call.shapes[0])
    listed = words(rank, call.dims("dimension", rank))
    return Rule(formula([listed], [[*listed, "1"]]))


RULES: dict[str, str | Family] = {
    **dict.fromkeys(
        """
        softmax _softmax log_softmax _log_softmax cumprod cummax cummin logcumsumexp sort argsort
        topk glu amax amin argmax argmin all any prod var std var_mean std_mean median logsumexp
        norm linalg_vector_norm
        """.split(),
        along(),
    ),
    **dict.fromkeys(
        """
        cumsum diff split split_with_sizes chunk unbind tensor_split narrow select cat concat
        concatenate stack
        """.split(),
        along(linear=True),
    ),
    "flip": along("dims", linear=True),
    "roll": along("dims", linear=True),
    "sum": along(linear=True, summed=True),
    "mean": along(linear=True, summed=True, means=True),
    "count_nonzero": along(summed=True),
    "max": extreme,
    "min": extreme,
    "pad": pad,
    "constant_pad_nd": pad,
    "tril": triangle,
    "triu": triangle,
    "histc": histc,
    "_weight_norm": weight_norm,
    "slice": slice_,
    "unfold": unfold,
}
