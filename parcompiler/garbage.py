"""Fewer collections of garbage while something large is made.

A compiler makes objects by the million that live until it ends. The interpreter looks through the
young ones after every 700 of them, and finds next to nothing: that was a fifth of the time of a
plan for GPT-3. The threshold is higher meanwhile, not infinite: what torch.export leaves in
circles is still let go.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLD = 50_000  # new objects between two collections


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Look for garbage rarely, unless the caller has switched that off or made it rarer still.

    >>> before = gc.get_threshold()
    >>> with rarely_collected():
    ...     gc.get_threshold()[0] >= THRESHOLD
    True
    >>> gc.get_threshold() == before
    True
    """
    before = gc.get_threshold()
    if 0 < before[0] < THRESHOLD:
        gc.set_threshold(THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
