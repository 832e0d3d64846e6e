"""The numbers that sizes take while formulas in them are looked for.

A length goes down from that of the capture, for tables of positions end there; the batch goes up.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from parcompiler.symbolic.sizes import InputSize

FEWEST = 8  # units of a length that goes down


@dataclass(frozen=True, slots=True)
class Probe:
    """Numbers of one size: `grid` to fit polynomials, `odd` to check them.

    `generic` is a prime or a multiple of one, so that it is like no other size of the model.
    """

    grid: tuple[int, int, int, int]
    odd: int
    generic: int


def probes(sizes: Sequence[InputSize], unit: int, taken: Collection[int]) -> dict[str, Probe]:
    """Numbers for these sizes, by letter; lengths are multiples of `unit`, `taken` other sizes."""
    numbers = {}
    for number, size in enumerate(sizes):
        count, rest = divmod(size.now, unit)
        if size.letter == "b":
            numbers["b"] = _up(size.now, 7)
        elif count >= FEWEST and not rest:
            numbers[size.letter] = _down(count, unit, number, taken)
        else:
            numbers[size.letter] = _up(size.now, (11, 13, 17, 19)[number % 4])
    return numbers


def _up(now: int, prime: int) -> Probe:
    """Multiples; one row alone lies in memory in another way than several, and is left out."""
    first = 2 if now == 1 else 1
    one, two, three, four, five = (now * (first + k) for k in range(5))
    return Probe((one, two, three, four), five, now * prime)


def _down(count: int, unit: int, number: int, taken: Collection[int]) -> Probe:
    """Parts of a length of `count` units."""
    free = [k for k in range(count - 1, 2, -1) if k * unit not in taken]
    primes = [k for k in free if all(k % n for n in range(2, k))]
    prime = primes[number % len(primes)] if primes else count - 1
    grid = (count, count // 2, max(2, count // 4), count - count // 4)
    others = [k for k in range(2, count) if k not in grid and k != prime]
    a, b, c, d = (k * unit for k in grid)
    return Probe((a, b, c, d), others[len(others) // 2] * unit, prime * unit)
