"""Rules of matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parcompiler.spmd.along import spelled
from parcompiler.spmd.call import Call
from parcompiler.spmd.rule import Rule
from parcompiler.spmd.strategy import Size

LINES: Mapping[str, str] = {
    "linear": "*b k, n k + n -> *b n",
    "mm": "m k, k n -> m n",
    "mv": "m k, k -> m",
    "dot": "k, k -> ",
    "outer": "m, n -> m n",
    "bmm": "b m k, b k n -> b m n",
    "bilinear": "*b i, *b j, n i j + n -> *b n",
}


def multiplied(call: Call) -> Rule:
    """matmul: vectors, matrices, and batches of them that are matched from the last."""
    left, right = (len(shape) for shape in call.shapes)
    if left == 1:
        return Rule("k, k -> " if right == 1 else "k, *b k n -> *b n")
    return Rule("*b m k, k -> *b m" if right == 1 else "*b m k, *b k n -> *b m n")


def added(product: str, result: str) -> Mapping[str, str]:
    """The lines of a product that is added to a tensor, by the number of dimensions of that."""
    names = result.split()
    return {
        str(rank): f"{' '.join(names[len(names) - rank :])} + {product} -> {result}"
        for rank in range(len(names) + 1)
    }


ADDED: Mapping[str, Mapping[str, str]] = {
    "addmm": added("m k, k n", "m n"),
    "addmv": added("m k, k", "m"),
    "baddbmm": added("b m k, b k n", "b m n"),
    "addbmm": added("b m k, b k n", "m n"),
}


def summed(call: Call) -> Rule:
    """addmm and the like."""
    lines = ADDED[call.base]
    return Rule(lines[str(len(call.shapes[0]))])


def contracted(call: Call) -> Rule | None:
    """einsum says its own line; a letter twice in one operand is a diagonal and stays whole."""
    equation = str(call.arguments["equation"]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    operands = left.split(",")
    if len(operands) != len(call.operands):
        return None
    if not arrow:
        letters = sorted({letter for letter in left if letter.isalpha()})
        once = "".join(letter for letter in letters if left.count(letter) == 1)
        right = f"...{once}" if "..." in left else once
    whole = {letter for side in (*operands, right) for letter in side if side.count(letter) > 1}
    return Rule(spelled([_spaced(side, whole) for side in operands], [_spaced(right, whole)]))


def _spaced(letters: str, whole: set[str]) -> list[str]:
    """The words of one operand of an einsum."""
    words = list(letters.replace("...", "."))
    return ["*b" if word == "." else f"({word})" if word in whole else word for word in words]


def grouped(call: Call) -> Rule | None:
    """Rows of several experts, each times the matrix of its own: rows and experts stay whole."""
    if [len(shape) for shape in call.shapes] != [2, 3, 1]:
        return None
    return Rule("(t) k, (e) k n, !(e) -> (t) n")


def convolved(call: Call) -> Rule | None:
    """Convolutions: over the batch, output channels, input channels, or groups of both."""
    image, weight = call.shapes[:2]
    space = len(weight) - 2
    batch = ["b"] if len(image) == space + 2 else []
    groups, around = int(call.arguments.get("groups", 1)), ["1"] * space
    transposed = "transpose" in call.name or bool(call.arguments.get("transposed", False))
    if groups == 1:
        filters = ["c", "o"] if transposed else ["o", "c"]
        line = _convolution(batch, "c", filters, "o", around)
        return Rule(line)
    line = _convolution(batch, "g", ["g", "1"], "g", around)
    return Rule(line, (("g", Size("groups", None, groups)),))


def _convolution(
    batch: Sequence[str], channel: str, filters: Sequence[str], out: str, around: Sequence[str]
) -> str:
    """The line of a convolution, with its bias."""
    sides = [[*batch, channel, *around], [*filters, *around], [*batch, out, *around]]
    image, weight, result = map(" ".join, sides)
    return f"{image}, {weight} + {out} -> {result}"


FAMILIES = {
    "matmul": multiplied,
    **dict.fromkeys(ADDED, summed),
    "einsum": contracted,
    "grouped_mm_fallback": grouped,
    "_grouped_mm": grouped,
    **dict.fromkeys(
        (
            *("conv1d", "conv2d", "conv3d", "convolution"),
            *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        ),
        convolved,
    ),
}
