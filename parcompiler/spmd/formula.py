"""Rules: one formula says which dimensions of operands and results split together.

    linear      *b k, n k + n -> *b n
    softmax     !*b (k) -> *b (k)

A word is a dimension. A word is split everywhere it appears; one that no result has is summed over,
so that splitting it leaves each rank a summand. A word in parentheses, and `1`, is not split. `*b`
is any number of dimensions; those of several operands are matched from the last, and one of size 1
is stretched. `,` multiplies operands, `+` adds them, and `!` marks an operand in which the operator
is not linear. Dimensions of different size may share a word: they are split where the number of
ranks divides both (heads of queries with those of keys, the rows of a matrix with its flattened
elements).

>>> formula = Formula.parse("*b k, n k + n -> *b n")
>>> [(operand.words, operand.summand) for operand in formula.operands]
[(('*b', 'k'), 0), (('n', 'k'), 0), (('n',), 1)]
>>> formula.bind([(2, 5, 8), (6, 8)], [(2, 5, 6)]).operands
(('b2', 'b1', 'k'), ('n', 'k'))
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import gcd

from parcompiler.capture.effects import is_random
from parcompiler.spmd.call import NodeCall, Shape
from parcompiler.spmd.placement import I, P, Placement, R, S
from parcompiler.spmd.strategy import Draws, SizeArgument, Strategy

Words = tuple[str, ...]  # one for each dimension; "" if it is not split
Segments = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FormulaOperand:
    """An operand: its words, the summand that it belongs to, and whether the operator is linear in
    it."""

    words: Words
    summand: int
    linear: bool


@dataclass(frozen=True, slots=True)
class Bound:
    """A formula on shapes: the word of every dimension, and the divisibility of each word.

    The number of ranks must divide `grain` to split a word into even pieces; words in `even` have
    dimensions of different sizes and are split only evenly.
    """

    operands: tuple[Words, ...]
    results: tuple[Words, ...]
    grain: Mapping[str, int]
    even: frozenset[str]


@dataclass(frozen=True, slots=True)
class Formula:
    """A parsed formula."""

    operands: tuple[FormulaOperand, ...]
    results: tuple[Words, ...]

    @staticmethod
    @cache
    def parse(text: str) -> Formula:
        """Parse a formula."""
        left, _, right = text.partition("->")
        operands = [
            FormulaOperand(tuple(factor.replace("!", " ").split()), index, "!" not in factor)
            for index, summand in enumerate(left.split("+"))
            for factor in summand.split(",")
        ]
        return Formula(tuple(operands), tuple(tuple(words.split()) for words in right.split(",")))

    def bind(
        self,
        shapes: Sequence[Shape],
        results: Sequence[Shape],
        sizes: Iterable[tuple[str, int]] = (),
    ) -> Bound | None:
        """The formula on the shapes of operands and results; None where it does not fit.

        Operands that a call leaves out (a bias that is None) may be missing at the end. `sizes` are
        words with a further number that must be divisible with them (of groups, of heads).
        """
        pairs = [(item.words, shape) for item, shape in zip(self.operands, shapes, strict=False)]
        pairs += zip(self.results, results, strict=True)
        named = [_words(words, shape) for words, shape in pairs]
        if len(pairs) < len(shapes) + len(results) or None in named:
            return None
        known = [words for words in named if words is not None]
        sizes_of: dict[str, set[int]] = {}
        for words, (_, shape) in zip(known, pairs, strict=True):
            for word, size in zip(words, shape, strict=True):
                if word:
                    sizes_of.setdefault(word, set()).add(size)
        for word, size in sizes:
            if word in sizes_of:
                sizes_of[word].add(size)
        grain = {word: gcd(*dims) for word, dims in sizes_of.items()}
        even = frozenset(word for word, dims in sizes_of.items() if len(dims) > 1)
        return Bound(tuple(known[: len(shapes)]), tuple(known[len(shapes) :]), grain, even)


def _words(words: Words, shape: Shape) -> Words | None:
    """A word for each dimension of `shape`; None where there are too many or too few.

    A word with a star stands for all remaining dimensions.
    """
    named: list[str] = []
    for word in words:
        inner = word.strip("()")
        if inner.startswith("*") and not word.startswith("("):
            named += [f"{inner[1:]}{k}" for k in range(len(shape) - len(words) + 1, 0, -1)]
        else:
            count = len(shape) - len(words) + 1 if inner.startswith("*") else 1
            named += [word] * count
    if len(named) != len(shape):
        return None
    return tuple(
        word if size > 1 and word != "1" and not word.startswith("(") else ""
        for word, size in zip(named, shape, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Rule:
    """How one call may be split.

    When a word of `formula` is split, the arguments of `sizes` become local: pairs of a word and an
    argument. A word of `means` is not summed but averaged over. `affine` says that the operator
    adds a constant, so that summands cannot pass through. Pieces have at least `least` elements.
    """

    formula: str
    sizes: tuple[tuple[str, SizeArgument], ...] = ()
    means: frozenset[str] = frozenset()
    affine: bool = False
    least: int = 1


Family = Callable[[NodeCall], Rule | None]  # the rule of a family of operators


def replicated(call: NodeCall) -> tuple[Strategy, ...]:
    """Every rank computes the whole: with whole gradients (I), or with summands of them (R).

    Operands and results have the same type, as the backward is linear in the incoming gradient:
    whole gradients give whole ones, and summands give summands. Without a gradient, R stands for
    both.
    """
    draws: Draws = "same" if is_random(call.node) else ""
    everywhere = Strategy((R,) * len(call.operands), (R,) * len(call.results), draws=draws)
    if not any((*call.gradients, *call.carries)):
        return (everywhere,)
    inputs = tuple(I if carries else R for carries in call.gradients)
    outputs = tuple(I if carries else R for carries in call.carries)
    return replace(everywhere, inputs=inputs, outputs=outputs), everywhere


def expand(
    rule: Rule, call: NodeCall, n: int, *, segments: Sequence[Segments]
) -> Iterator[Strategy]:
    """The strategies of a rule on `n` ranks: splits of each word, then summands passed through.

    Pieces may differ by an element. `segments` are divisions of dimensions that may also be split
    within each segment.
    """
    formula = Formula.parse(rule.formula)
    named = [(word, size.whole) for word, size in rule.sizes]
    bound = formula.bind(call.shapes, call.result_shapes, named)
    if bound is None:
        return
    for word, grain in bound.grain.items():
        if grain // n < rule.least:
            continue
        if grain % n == 0 or (word not in bound.even and grain > n):
            yield from _split(word, (), rule, bound, call, n)
        for division in segments:
            divides = sum(division) == grain and all(part % n == 0 for part in division)
            if divides and word not in bound.even:
                yield from _split(word, division, rule, bound, call, n)
    if not rule.affine:
        yield from _summands(formula, call)


def _split(
    word: str, division: Segments, rule: Rule, bound: Bound, call: NodeCall, n: int
) -> Iterator[Strategy]:
    """The strategies that split one word: several when a summand may be chosen in several ways."""
    formula = Formula.parse(rule.formula)
    contracted = not any(word in words for words in bound.results)
    averaged = contracted and word in rule.means
    sizes = tuple(size for split, size in rule.sizes if split == word)
    if (averaged and (bound.grain[word] % n or division)) or (sizes and division):
        return
    types, outputs = (
        [S(words.index(word), division) if word in words else None for words in side]
        for side in (bound.operands, bound.results)
    )
    # If a word is summed over, a summand without that word must count once: it is P.
    operands = zip(formula.operands, types, strict=False)
    split = {operand.summand for operand, placement in operands if placement is not None}
    choices = _linear_operands(formula, len(types), except_in=split) if contracted else [()]
    for chosen in choices:
        yield Strategy(
            tuple(x or (P if place in chosen else R) for place, x in enumerate(types)),
            tuple(output or (P if contracted else R) for output in outputs),
            sizes,
            factor=1 / n if averaged else 1.0,
            draws="own" if is_random(call.node) else "",
        )


def _linear_operands(
    formula: Formula, number: int, except_in: set[int]
) -> Iterable[tuple[int, ...]]:
    """One linear operand of each other summand; nothing where a summand has none."""
    summands: dict[int, list[int]] = {}
    for place, operand in enumerate(formula.operands[:number]):
        if operand.summand not in except_in:
            linear = summands.setdefault(operand.summand, [])
            linear += [place] if operand.linear else []
    return itertools.product(*summands.values())


def _summands(formula: Formula, call: NodeCall) -> Iterator[Strategy]:
    """The strategies that pass summands through."""
    draws: Draws = "same" if is_random(call.node) else ""
    for chosen in _linear_operands(formula, len(call.operands), except_in=set()):
        inputs: tuple[Placement, ...] = tuple(
            P if place in chosen else R for place in range(len(call.operands))
        )
        values = [call.operands[place].value for place in chosen] + [*call.results]
        if chosen and all(value.dtype.is_floating_point for value in values):
            yield Strategy(inputs, (P,) * len(call.results), draws=draws)
