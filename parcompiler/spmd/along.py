"""Rules of operators that work along, or reduce, some dimensions: softmax, sum, sort, cumsum."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from parcompiler.spmd.call import Call
from parcompiler.spmd.elementwise import curved
from parcompiler.spmd.rule import Rule


def words(rank: int, whole: Collection[int] = ()) -> list[str]:
    """A word for each of `rank` dimensions, `1` for those that stay whole.

    >>> words(3, whole=(1,))
    ['d0', '1', 'd2']
    """
    return ["1" if dim in whole else f"d{dim}" for dim in range(rank)]


def spelled(operands: Sequence[Sequence[str]], results: Sequence[Sequence[str]]) -> str:
    """The line with these words, operands multiplied."""
    sides = (", ".join(" ".join(listed) for listed in side) for side in (operands, results))
    return " -> ".join(sides)


def _along(linear: bool, argument: str = "dim") -> Callable[[Call], Rule | None]:
    """Operators that keep the rank, and need one or some dimensions whole."""

    def rule(call: Call) -> Rule | None:
        rank = len(call.shapes[0])
        listed = words(rank, call.dims(argument, rank))
        if len(call.operands) != 1:
            return None
        prefix = [] if linear else ["!"]
        return Rule(spelled([prefix + listed], [listed] * len(call.results)))

    return rule


def _reduced(call: Call) -> tuple[tuple[int, ...], bool] | None:
    """The dimensions that a call reduces, and whether they are kept with size 1."""
    if len(call.operands) != 1:
        return None
    rank = len(call.shapes[0])
    return call.dims("dim", rank), bool(call.arguments.get("keepdim", False))


def _over(linear: bool, kept_whole: bool, means: bool = False) -> Callable[[Call], Rule | None]:
    """Reductions: over dimensions that are added up, or that must stay whole."""

    def rule(call: Call) -> Rule | None:
        reduction = _reduced(call)
        if reduction is None:
            return None
        dims, keepdim = reduction
        rank = len(call.shapes[0])
        before = words(rank, dims if kept_whole else ())
        after = [
            "1" if dim in dims else word
            for dim, word in enumerate(before)
            if keepdim or dim not in dims
        ]
        averaged = frozenset(before[dim] for dim in dims) if means else frozenset()
        prefix = [] if linear else ["!"]
        line = spelled([prefix + before], [after] * len(call.results))
        return Rule(line, means=averaged)

    return rule


def differences(call: Call) -> Rule:
    """diff with what is put before and after it: its dimension stays whole."""
    rank = len(call.shapes[0])
    listed = " ".join(words(rank, call.dims("dim", rank)))
    return Rule(" + ".join([listed] * len(call.operands)) + f" -> {listed}")


def padded(call: Call) -> Rule | None:
    """pad: the padded dimensions stay whole; with zeros, or what is there already, it is linear."""
    rank, amounts = len(call.shapes[0]), call.arguments["pad"]
    if not all(isinstance(amount, int) for amount in amounts):
        return None
    constant = call.arguments.get("mode", "constant") == "constant"
    mirrored = range(rank - len(amounts) // 2, rank)
    dims = [dim for dim in mirrored if not constant or any(amounts[2 * (rank - 1 - dim) :][:2])]
    listed = " ".join(words(rank, dims))
    value = call.arguments.get("value")
    return Rule(f"{listed} -> {listed}", affine=constant and value not in (None, 0))


def triangle(call: Call) -> Rule:
    """tril and triu: the matrices stay whole."""
    rank = len(call.shapes[0])
    listed = " ".join(words(rank, (rank - 2, rank - 1)))
    return Rule(f"{listed} -> {listed}")


def histogram(call: Call) -> Rule | None:
    """Counts of the pieces add up, when the bins are given."""
    if not call.arguments["min"] < call.arguments["max"]:
        return None
    rank = len(call.shapes[0])
    return Rule(f"!{' '.join(words(rank))} -> 1")


def halved(call: Call) -> Rule:
    """glu: its dimension stays whole."""
    rank = len(call.shapes[0])
    listed = " ".join(words(rank, call.dims("dim", rank)))
    return Rule(f"!{listed} -> {listed}")


def extreme(call: Call) -> Rule | None:
    """max and min: over a dimension, or of two tensors."""
    return curved(call) if len(call.operands) == 2 else _over(linear=False, kept_whole=True)(call)


def weighed(call: Call) -> Rule:
    """The norm of a weight: all but one dimension of it stays whole."""
    rank = len(call.shapes[0])
    dim = int(call.arguments.get("dim", 0)) % rank
    listed = ["c" if place == dim else "1" for place in range(rank)]
    direction, length = (" ".join(listed if len(s) == rank else ["(*x)"]) for s in call.shapes)
    return Rule(f"!{direction}, {length} -> {direction}")


_bent, _straight = _along(linear=False), _along(linear=True)
FAMILIES = {
    **dict.fromkeys(
        (
            "softmax",
            "_softmax",
            "log_softmax",
            "_log_softmax",
            "cumprod",
            "cummax",
            "cummin",
            "logcumsumexp",
            "sort",
            "argsort",
            "topk",
        ),
        _bent,
    ),
    "cumsum": _straight,
    "flip": _along(linear=True, argument="dims"),
    "roll": _along(linear=True, argument="dims"),
    "sum": _over(linear=True, kept_whole=False),
    "mean": _over(linear=True, kept_whole=False, means=True),
    "count_nonzero": _over(linear=False, kept_whole=False),
    **dict.fromkeys(
        (
            "amax",
            "amin",
            "argmax",
            "argmin",
            "all",
            "any",
            "prod",
            "var",
            "std",
            "var_mean",
            "std_mean",
            "median",
            "logsumexp",
            "norm",
            "linalg_vector_norm",
        ),
        _over(linear=False, kept_whole=True),
    ),
    "max": extreme,
    "min": extreme,
    "diff": differences,
    "pad": padded,
    "constant_pad_nd": padded,
    "tril": triangle,
    "triu": triangle,
    "histc": histogram,
    "glu": halved,
    "_weight_norm": weighed,
}
