"""Rules of operators that take tensors apart and put them together: split, slice, select, cat.

A dimension that is taken apart stays whole here; `segments` splits it within its parts.
"""

from __future__ import annotations

from parcompiler.spmd.along import spelled, words
from parcompiler.spmd.call import Call
from parcompiler.spmd.rule import Rule
from parcompiler.spmd.strategy import Size


def divided(call: Call) -> Rule:
    """split, chunk, unbind and the like: the results are the parts along one dimension."""
    rank = len(call.shapes[0])
    dim = int(call.arguments.get("dim", 0)) % rank
    before = words(rank, (dim,))
    after = [word for place, word in enumerate(before) if place != dim or "unbind" not in call.name]
    return Rule(spelled([before], [after] * len(call.results)))


def sliced(call: Call) -> Rule:
    """slice: its dimension stays whole unless all of it is taken."""
    rank = len(call.shapes[0])
    dim = int(call.arguments.get("dim", 0)) % rank
    size, taken = call.shapes[0][dim], call.result_shapes[0][dim]
    if taken != size:
        listed = words(rank, (dim,))
        return Rule(spelled([listed], [listed]))
    listed, end = words(rank), call.arguments.get("end")
    names_size = isinstance(end, int) and end == size
    return Rule(
        spelled([listed], [listed]), ((listed[dim], Size("end", None, size)),) if names_size else ()
    )


def narrowed(call: Call) -> Rule:
    """narrow: its dimension stays whole."""
    rank = len(call.shapes[0])
    listed = words(rank, (int(call.arguments["dim"]) % rank,))
    return Rule(spelled([listed], [listed]))


def selected(call: Call) -> Rule:
    """select: its dimension stays whole, and is gone."""
    rank = len(call.shapes[0])
    dim = int(call.arguments["dim"]) % rank
    before = words(rank, (dim,))
    return Rule(spelled([before], [before[:dim] + before[dim + 1 :]]))


def joined(call: Call) -> Rule | None:
    """cat: summands of all parts make summands of the whole."""
    rank = len(call.result_shapes[0])
    if any(len(shape) != rank for shape in call.shapes):
        return None  # an empty list among them
    dim = int(call.arguments.get("dim", 0)) % rank
    listed = " ".join(words(rank, (dim,)))
    return Rule(" + ".join([listed] * len(call.operands)) + f" -> {listed}")


def stacked(call: Call) -> Rule:
    """stack: the new dimension stays whole."""
    rank = len(call.result_shapes[0])
    dim = int(call.arguments.get("dim", 0)) % rank
    after = words(rank, (dim,))
    before = " ".join(after[:dim] + after[dim + 1 :])
    return Rule(" + ".join([before] * len(call.operands)) + f" -> {' '.join(after)}")


def windowed(call: Call) -> Rule:
    """unfold: its dimension stays whole, and the windows are the last."""
    rank = len(call.shapes[0])
    listed = words(rank, (call.dims("dimension", rank)))
    return Rule(spelled([listed], [[*listed, "1"]]))


FAMILIES = {
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind", "tensor_split"), divided),
    "slice": sliced,
    "narrow": narrowed,
    "select": selected,
    "cat": joined,
    "concat": joined,
    "concatenate": joined,
    "stack": stacked,
    "unfold": windowed,
}
