"""Names from a model, escaped and shortened.

>>> print(clean("a\\x1b[31mb\\nc"))
a\\x1b[31mb\\nc
>>> print(ranges(["wte", "h.0", "h.1", "h.2", "head"]))
wte, h.0 … h.2 (3), head
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

PERIODS = range(1, 9)  # numbers of pieces that a layer may have
_NUMBER = re.compile(r"(\d{1,9})")


def clean(text: str) -> str:
    """`text` with unprintable characters escaped: control characters, line breaks, and marks that
    change the direction of writing."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def ranges(names: Sequence[str], *, short: bool = False) -> str:
    """Names separated by commas; a run of numbered ones is shown by its first, last and count.

    Pieces of numbered layers form a run too:

    >>> ranges(["0.mlp", "1.attn", "1.mlp", "2.attn", "2.mlp", "3.attn"])
    '0.mlp … 3.attn (6)'

    With `short` the last name is shown without the common prefix:

    >>> ranges(["model.h.0", "model.h.1", "model.h.2"], short=True)
    'model.h.0 … 2 (3)'
    """
    return ", ".join(_ranges(names, short))


def numbers(values: Iterable[int]) -> str:
    """
    >>> numbers([0, 1, 2, 5])
    '0 … 2, 5'
    """
    return re.sub(r" \(\d+\)", "", ranges([str(value) for value in values]))


def _ranges(names: Sequence[str], short: bool) -> Iterator[str]:
    """The runs of `names` in order."""
    begin = 0
    while begin < len(names):
        length = max(_length(names, begin, period) for period in PERIODS)
        if length > 1:
            first, last = names[begin], names[begin + length - 1]
            parts, pairs = last.split("."), zip(first.split("."), last.split("."), strict=False)
            same = next((k for k, (a, b) in enumerate(pairs) if a != b), 0) if short else 0
            yield f"{first} … {'.'.join(parts[same:])} ({length})"
        else:
            yield names[begin]
        begin += length


def _length(names: Sequence[str], begin: int, period: int) -> int:
    """The length of the run from `begin` in which each name follows the one `period` before; 1 if
    it is too short."""
    end, place = begin + period, None
    while end < len(names):
        step = _step(names[end - period], names[end])
        if step is None or (period == 1 and place not in (None, step)):
            break
        place, end = step, end + 1
    length = end - begin
    return length if length >= max(3, 2 * period) else 1


def _step(first: str, second: str) -> int | None:
    """The index of the number that is one larger in `second` than in `first`; None if that is not
    the only difference."""
    before, after = _NUMBER.split(first), _NUMBER.split(second)
    if len(before) != len(after):
        return None
    places = [k for k, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
    if len(places) != 1 or places[0] % 2 == 0:
        return None
    (place,) = places
    return place if int(after[place]) == int(before[place]) + 1 else None
