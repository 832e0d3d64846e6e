"""The numbers that sizes take while their polynomials are looked for.

A length goes down from that of the capture, for tables of positions end there; the batch goes up.
One number of each size, the generic one, is a prime or a multiple of one, so that it is like no
other size of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from parcompiler.symbolic.fit import Space
from parcompiler.symbolic.sizes import Size, Sizes

FEWEST = 8  # of a length that goes down


@dataclass(frozen=True, slots=True)
class Probes:
    """`values` of each letter, one more than the usual degree and `more` for higher ones; `checks`
    are further points."""

    generic: Sizes
    values: dict[str, tuple[int, ...]]
    more: dict[str, tuple[int, ...]]
    checks: tuple[Sizes, ...]

    @property
    def question(self) -> Sizes:
        """Where to look once more: far from the capture, and no two sizes changed alike."""
        return {
            letter: self.generic[letter] if letter == "b" else min(self.values[letter])
            for letter in self.values
        }

    @property
    def far(self) -> dict[str, tuple[int, ...]]:
        """More rows than any length has elements: a value that was expanded over the rows has less
        memory than elements then, and costs follow that."""
        longest = max((max(column) for column in self.values.values()), default=1)
        return {
            letter: tuple(8 * longest * size for size in column) if letter == "b" else column
            for letter, column in self.values.items()
        }

    def spaces(self) -> Iterator[Space]:
        """What to look in: degree 1 in the batch and 2 in lengths, then one more of each."""
        yield Space(self.values, lengths=2)
        yield Space({name: self.values[name] + self.more[name] for name in self.values}, lengths=3)


def probes(sizes: Sequence[Size], unit: int, taken: Collection[int]) -> Probes:
    """Numbers for these sizes; lengths are multiples of `unit`. `taken` are other sizes."""
    generic, values, more, check = {}, {}, {}, {}
    for number, size in enumerate(sizes):
        letter = size.letter
        if size.letter == "b":
            usual, rest, odd, prime = _up(size.now, 1, 7)
        elif size.now // unit >= FEWEST and size.now % unit == 0:
            usual, rest, odd, prime = _down(size.now // unit, unit, number, taken)
        else:
            usual, rest, odd, prime = _up(size.now, 2, (11, 13, 17, 19)[number % 4])
        generic[letter], values[letter], more[letter], check[letter] = prime, usual, rest, odd
    return Probes(generic, values, more, (check, generic))


Numbers = tuple[tuple[int, ...], tuple[int, ...], int, int]


def _up(now: int, degree: int, prime: int) -> Numbers:
    """Multiples; one row alone lies in memory in another way than several, and is left out."""
    least = 2 if now == 1 else 1
    usual = tuple(now * k for k in range(least, least + degree + 1))
    return usual, (now * (least + degree + 1),), now * (least + degree + 2), now * prime


def _down(count: int, unit: int, number: int, taken: Collection[int]) -> Numbers:
    """Parts of a length of `count` units."""
    primes = [k for k in range(count - 1, 2, -1) if _is_prime(k) and k * unit not in taken]
    prime = primes[number % len(primes)] if primes else count - 1
    quarters = [count, count // 2, max(2, count // 4), count - count // 4]
    others = [k for k in range(2, count) if k not in quarters and k != prime]
    usual, rest, odd = quarters[:3], quarters[3], others[len(others) // 2]
    return tuple(k * unit for k in usual), (rest * unit,), odd * unit, prime * unit


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % k for k in range(2, int(number**0.5) + 1))
