"""The notation of the rules: one line says which dimensions of operands and results go together.

    linear      *b k, n k + n -> *b n
    softmax     !*b (k) -> *b (k)

A word is a dimension. The same word is split everywhere it appears; one that no result has is
summed over, so that splitting it leaves each rank a summand. A word in parentheses, and `1`, is
not split. `*b` is any number of dimensions; those of several operands are matched from the last,
and one of size 1 is stretched. `,` multiplies operands, `+` adds them, and `!` marks an operand in
which the operator is not linear. Dimensions of different size may share a word: they are split
where the number of ranks divides both (heads of queries with those of keys, the rows of a matrix
with its flattened elements).

>>> line = Line.parse("*b k, n k + n -> *b n")
>>> [(factor.words, factor.summand) for factor in line.operands]
[(('*b', 'k'), 0), (('n', 'k'), 0), (('n',), 1)]
>>> bind(line, [(2, 5, 8), (6, 8)], [(2, 5, 6)]).operands
(('b2', 'b1', 'k'), ('n', 'k'))
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd

Shape = tuple[int, ...]
Words = tuple[str, ...]  # one a dimension; "" for one that is not split


@dataclass(frozen=True, slots=True)
class Factor:
    """An operand of a line: its words, the summand that it belongs to, and whether it is linear."""

    words: Words
    summand: int
    linear: bool


@dataclass(frozen=True, slots=True)
class Line:
    """A parsed line."""

    operands: tuple[Factor, ...]
    results: tuple[Words, ...]

    @staticmethod
    @cache
    def parse(text: str) -> Line:
        """The line that `text` is."""
        left, _, right = text.partition("->")
        operands = [
            Factor(tuple(factor.replace("!", " ").split()), index, "!" not in factor)
            for index, summand in enumerate(left.split("+"))
            for factor in summand.split(",")
        ]
        return Line(tuple(operands), tuple(tuple(words.split()) for words in right.split(",")))


@dataclass(frozen=True, slots=True)
class Bound:
    """A line on shapes: the words of every dimension, and of each word what must be divided.

    `grain` is what the number of ranks divides when a word is split in even pieces; words in `even`
    have dimensions of different sizes and are split in no other.
    """

    operands: tuple[Words, ...]
    results: tuple[Words, ...]
    grain: Mapping[str, int]
    even: frozenset[str]


def bind(
    line: Line,
    shapes: Sequence[Shape],
    results: Sequence[Shape],
    sizes: Iterable[tuple[str, int]] = (),
) -> Bound | None:
    """The words of a line on the shapes of operands and results; None where they do not fit.

    Operands that a call leaves out (a bias that is None) may be missing at the end. `sizes` are
    words with a further number that must be divided with them (of groups, of heads).
    """
    pairs = [(factor.words, shape) for factor, shape in zip(line.operands, shapes, strict=False)]
    pairs += zip(line.results, results, strict=True)
    if len(pairs) < len(shapes) + len(results):
        return None
    named = [_words(words, shape) for words, shape in pairs]
    found: dict[str, set[int]] = {}
    for words, (_, shape) in zip(named, pairs, strict=True):
        if words is None:
            return None
        for word, size in zip(words, shape, strict=True):
            if word:
                found.setdefault(word, set()).add(size)
    for word, size in sizes:
        if word in found:
            found[word].add(size)
    grain = {word: gcd(*alike) for word, alike in found.items()}
    even = frozenset(word for word, alike in found.items() if len(alike) > 1)
    known = [words for words in named if words is not None]
    return Bound(tuple(known[: len(shapes)]), tuple(known[len(shapes) :]), grain, even)


def _words(words: Words, shape: Shape) -> Words | None:
    """A word for each dimension of `shape`: those of size 1 have none."""
    named = list(itertools.chain.from_iterable(_dims(word, words, shape) for word in words))
    if len(named) != len(shape):
        return None
    return tuple(
        word if size > 1 and word != "1" and not word.startswith("(") else ""
        for word, size in zip(named, shape, strict=True)
    )


def _dims(word: str, words: Words, shape: Shape) -> list[str]:
    """The dimensions that a word stands for: with a star, all that the others leave."""
    inner = word.strip("()")
    if not inner.startswith("*"):
        return [word]
    number = len(shape) - len(words) + 1
    names = [f"{inner[1:]}{place}" for place in range(number, 0, -1)]
    return [f"({name})" for name in names] if word.startswith("(") else names
