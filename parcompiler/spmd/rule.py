"""A rule on one call: its line, what else a split changes, and the strategies that follow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from parcompiler.spmd.call import Call, is_random, written
from parcompiler.spmd.line import Bound, Line, bind
from parcompiler.spmd.placement import I, P, Placement, R, S
from parcompiler.spmd.strategy import Draws, Size, Strategy

Segments = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """How one call may be split.

    `line` is as in `line.py`. When a word is split, the arguments of `sizes` become local: pairs
    of a word and an argument. A word of `means` is not summed but averaged over. `affine` says that
    the operator adds a constant, so that summands do not pass. Pieces have `least` elements.
    """

    line: str
    sizes: tuple[tuple[str, Size], ...] = ()
    means: frozenset[str] = frozenset()
    affine: bool = False
    least: int = 1


def replicated(call: Call) -> tuple[Strategy, ...]:
    """Every rank computes the whole: with whole gradients (I), or with summands of them (R).

    Both sides have the same type, for the backward is linear in the gradient that comes in: whole
    gradients give whole ones, and summands give summands. Where there is no gradient, R stands for
    both.
    """
    draws: Draws = "same" if is_random(call) else ""
    everywhere = Strategy((R,) * len(call.operands), (R,) * len(call.results), draws=draws)
    if not any((*call.gradients, *call.carries)):
        return (everywhere,)
    inputs = tuple(I if carries else R for carries in call.gradients)
    outputs = tuple(I if carries else R for carries in call.carries)
    return replace(everywhere, inputs=inputs, outputs=outputs), everywhere


def expand(
    rule: Rule, call: Call, n: int, *, uneven: bool = True, segments: Sequence[Segments] = ()
) -> tuple[Strategy, ...]:
    """The strategies of a rule on `n` ranks: splits of each word, then summands passed through.

    `uneven` allows pieces of different sizes. `segments` are divisions of dimensions that are split
    within each segment as well.
    """
    line = Line.parse(rule.line)
    named = [(word, size.whole) for word, size in rule.sizes]
    bound = bind(line, call.shapes, call.result_shapes, named)
    if bound is None:
        return ()
    found: list[Strategy] = []
    for word in bound.grain:
        if bound.grain[word] // n < rule.least:
            continue
        for division in _divisions(word, bound, n, uneven, segments):
            found += _split(word, division, rule, line, bound, call, n)
    found += [] if rule.affine else _passed(line, call)
    return tuple(found)


def _divisions(
    word: str, bound: Bound, n: int, uneven: bool, segments: Sequence[Segments]
) -> Iterator[Segments]:
    """The ways to split a word: in n pieces, and in n pieces of each of some segments."""
    size = bound.grain[word]
    if size % n == 0 or (uneven and word not in bound.even and size > n):
        yield ()
    if word not in bound.even:
        for division in segments:
            if sum(division) == size and all(part % n == 0 for part in division):
                yield division


def _split(
    word: str, division: Segments, rule: Rule, line: Line, bound: Bound, call: Call, n: int
) -> Iterator[Strategy]:
    """The strategies that split one word: several when a summand may be chosen in several ways."""
    contracted = not any(word in words for words in bound.results)
    if contracted and word in rule.means and (bound.grain[word] % n or division):
        return
    sizes = tuple(size for split, size in rule.sizes if split == word)
    if sizes and division:
        return
    outputs = tuple(_type(word, words, division) for words in bound.results)
    for inputs in (
        _inputs(word, division, line, bound)
        if contracted
        else [tuple(_type(word, words, division) or R for words in bound.operands)]
    ):
        yield Strategy(
            inputs,
            tuple(output or (P if contracted else R) for output in outputs),
            sizes,
            factor=1 / n if contracted and word in rule.means else 1.0,
            draws="own" if is_random(call) else "",
        )


def _type(word: str, words: Sequence[str], division: Segments) -> Placement | None:
    """The split of a tensor that has the word; None for one that has not."""
    return S(words.index(word), division) if word in words else None


def _inputs(
    word: str, division: Segments, line: Line, bound: Bound
) -> Iterator[tuple[Placement, ...]]:
    """The types of operands when a word is summed over: summands without it count once, as P."""
    types = [_type(word, words, division) for words in bound.operands]
    factors = line.operands[: len(types)]
    having = {f.summand for f, found in zip(factors, types, strict=True) if found is not None}
    for chosen in _choices(line, len(types), leaving=having):
        yield tuple(found or (P if place in chosen else R) for place, found in enumerate(types))


def _choices(line: Line, number: int, leaving: set[int]) -> Iterator[tuple[int, ...]]:
    """One linear operand of each summand; nothing where a summand has none."""
    summands: dict[int, list[int]] = {}
    for place, factor in enumerate(line.operands[:number]):
        if factor.summand not in leaving:
            linear = summands.setdefault(factor.summand, [])
            linear += [place] if factor.linear else []
    return itertools.product(*summands.values())


def _passed(line: Line, call: Call) -> Iterator[Strategy]:
    """Summands in, summands out."""
    draws: Draws = "same" if is_random(call) else ""
    for chosen in _choices(line, len(call.operands), leaving=set()):
        inputs = tuple(P if place in chosen else R for place in range(len(call.operands)))
        values = [call.operands[place].value for place in chosen] + [*call.results]
        if chosen and all(value.dtype.is_floating_point for value in values):
            yield Strategy(inputs, (P,) * len(call.results), draws=draws)


def is_sound(strategy: Strategy, call: Call) -> bool:
    """Whether operands that are updated in place have the type of the result that they become."""
    result = strategy.outputs[:1]
    return all(strategy.inputs[place] == result[0] for place in written(call) if result)
