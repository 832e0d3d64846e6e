"""Rules of operators that read or write where indices say: gather, index, scatter, index_add."""

from __future__ import annotations

from parcompiler.spmd.call import NodeCall, Shape
from parcompiler.spmd.dimensions import formula, words
from parcompiler.spmd.formula import Family, Rule


def index_select(call: NodeCall) -> Rule:
    """index_select: the selected rows may be split."""
    rank = len(call.shapes[0])
    if rank == 0:
        return Rule(", !i -> ")
    dim = int(call.arguments["dim"]) % rank
    before = words(rank, (dim,))
    after = [*before[:dim], "i", *before[dim + 1 :]]
    return Rule(f"{' '.join(before)}, !{'i' if call.shapes[1] else ''} -> {' '.join(after)}")


def gather(call: NodeCall) -> Rule:
    """gather and take_along_dim: dimensions in which table and indices agree, and the indices."""
    rank = len(call.shapes[0])
    table, index = call.shapes
    dim = call.dims("dim", rank)
    source, chosen = words(rank, dim), words(rank)
    for place in range(rank):
        if place not in dim and table[place] != index[place]:
            source[place] = chosen[place] = "1"
    return Rule(f"{' '.join(source)}, !{' '.join(chosen)} -> {' '.join(chosen)}")


def scatter(call: NodeCall) -> Rule:
    """scatter: dimensions in which all agree; linear in old and written values unless it
    reduces."""
    rank = len(call.shapes[0])
    listed = words(rank, call.dims("dim", rank))
    for place in range(rank):
        if len({shape[place] for shape in call.shapes}) > 1:
            listed[place] = "1"
    line = " ".join(listed)
    linear = "scatter_reduce" not in call.name and call.arguments.get("reduce") is None
    mark = "" if linear else "!"
    if len(call.operands) == 2:  # a number is written
        return Rule(f"{mark}{line}, !{line} -> {line}", affine=call.arguments.get("value") != 0)
    return Rule(f"{mark}{line}, !{line} + {mark}{line} -> {line}")


def index_add(call: NodeCall) -> Rule:
    """index_add: added rows may be split, as the other summand counts once."""
    rank = len(call.shapes[0])
    listed = words(rank, call.dims("dim", rank))
    dim = int(call.arguments["dim"]) % rank
    added = [*listed[:dim], "i", *listed[dim + 1 :]]
    line, source = " ".join(listed), " ".join(added)
    return Rule(f"{line} + !i, {source} -> {line}")


def index(call: NodeCall) -> Rule | None:
    """x[..., indices, ...] with integers: dimensions that are not indexed, and those of the
    indices."""
    if (indexing := _indices(call)) is None:
        return None
    places, indices, width = indexing
    rank = len(call.shapes[0])
    before = words(rank, places)
    kept = [word for dim, word in enumerate(before) if dim not in places]
    inside = [f"i{count}" for count in range(width, 0, -1)]
    first = places[0] if _adjacent(places) else 0
    after = [*kept[:first], *inside, *kept[first:]]
    listed = ", ".join("!" + " ".join(inside[width - len(shape) :]) for shape in indices)
    return Rule(f"{' '.join(before)}, {listed} -> {' '.join(after)}")


def index_put(call: NodeCall) -> Rule | None:
    """index_put: dimensions that are not indexed; if it accumulates, rows of the values as well."""
    indexing, value = _indices(call), call.operand("values")
    if indexing is None or value is None:
        return None
    places, indices, width = indexing
    rank = len(call.shapes[0])
    if len(value.shape) != width + rank - len(places) or not _adjacent(places):
        return None
    before = words(rank, places)
    kept = [word for dim, word in enumerate(before) if dim not in places]
    inside = [f"i{count}" for count in range(width, 0, -1)]
    if not call.arguments.get("accumulate"):
        inside = ["1"] * width
    values = " ".join([*kept[: places[0]], *inside, *kept[places[0] :]])
    listed = ", ".join("!" + " ".join(inside[width - len(shape) :]) for shape in indices)
    line = " ".join(before)
    # Indices select both the kept and the written elements, so they belong to the second summand.
    return Rule(f"{line} + {listed}, {values} -> {line}")


def _indices(call: NodeCall) -> tuple[list[int], list[Shape], int] | None:
    """The indexed dimensions, the shapes of the indices, and the dimensions that these make.

    None for masks, whose number of elements is not known in advance.
    """
    indices = [operand for operand in call.operands if operand.argument == "indices"]
    if any(operand.value.dtype.itemsize == 1 for operand in indices):
        return None
    places = [dim for dim, index in enumerate(call.arguments["indices"]) if index is not None]
    if not places or len(places) != len(indices):
        return None
    shapes = [operand.shape for operand in indices]
    return places, shapes, max(map(len, shapes))


def _adjacent(places: list[int]) -> bool:
    return places == list(range(places[0], places[0] + len(places)))


def one_hot(call: NodeCall) -> Rule | None:
    """one_hot with the number of classes: the indices."""
    if int(call.arguments.get("num_classes", -1)) < 0:
        return None
    listed = words(len(call.shapes[0]))
    return Rule(formula([["!", *listed]], [[*listed, "1"]]))


def searchsorted(call: NodeCall) -> Rule | None:
    """bucketize and searchsorted in one list of borders: the values."""
    names = {operand.argument: operand for operand in call.operands}
    borders = names.get("boundaries") or names.get("sorted_sequence")
    if len(names) != 2 or borders is None or len(borders.shape) != 1:
        return None
    lines = ["!(k)" if item is borders else "!*b" for item in names.values()]
    return Rule(f"{', '.join(lines)} -> *b")


RULES: dict[str, str | Family] = {
    "index_select": index_select,
    **dict.fromkeys(("gather", "take_along_dim"), gather),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), scatter),
    "index_add": index_add,
    "index": index,
    "index_put": index_put,
    "one_hot": one_hot,
    **dict.fromkeys(("bucketize", "searchsorted"), searchsorted),
}
