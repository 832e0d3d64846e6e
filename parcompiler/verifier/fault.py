"""A broken rule: its name, which is a sentence, and the detail that breaks it.

>>> print(Fault("data flows forward", "embed (stage 1) feeds head (stage 0)"))
data flows forward: embed (stage 1) feeds head (stage 0)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
LISTED = 4  # micro-batches that a message names before it only counts them


@dataclass(frozen=True, slots=True)
class Fault:
    """One place where a lowered program breaks a rule."""

    rule: str
    detail: str

    def __str__(self) -> str:
        """`rule: detail`."""
        return f"{self.rule}: {self.detail}"


def numbers(microbatches: Collection[int]) -> str:
    """Micro-batches as instructions name them; one fault covers all that break a rule in the same
    way.

    >>> numbers([3]), numbers({2, 0}), numbers(range(9))
    ('mb 3', 'mb 0, 2', 'mb 0, 1, 2, 3 … (9 of them)')
    """
    shown = ", ".join(str(i) for i in sorted(microbatches)[:LISTED])
    more = f" … ({len(microbatches)} of them)" if len(microbatches) > LISTED else ""
    return f"mb {shown}{more}"


def ranks(numbers: Iterable[int]) -> str:
    """The numbers of ranks.

    >>> ranks((1,)), ranks((0, 2))
    ('rank 1', 'ranks 0, 2')
    """
    listed = ", ".join(map(str, numbers))
    return f"ranks {listed}" if "," in listed else f"rank {listed}"


def repeated(items: Iterable[T]) -> Iterator[tuple[T, int]]:
    """The items that occur more than once, and how often.

    >>> list(repeated("abcab"))
    [('a', 2), ('b', 2)]
    """
    return ((item, count) for item, count in Counter(items).items() if count > 1)
