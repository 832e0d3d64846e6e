"""What the variables of a forward hold by themselves, while autograd keeps more for its backward.

So one run says what the same forward would hold if nothing were kept, as that of a block that is
recomputed. (What an operator made of several saves within itself counts until it ends.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from torch import fx

from parcompiler.cost.alive import Alive
from parcompiler.cost.stand_in import storage_of, tensors

Gone = Mapping[fx.Node, Collection[fx.Node]]


class Held:
    """`most` bytes that variables hold at once, and what the operator that runs makes.

    With each node that has run, the values of those that are `gone` with it are let go.
    """

    def __init__(self, alive: Alive, gone: Gone) -> None:
        self.most = self._now = 0
        self._alive, self._gone = alive, gone
        self._count: Counter[int] = Counter()  # variables by storage

    def before(self) -> None:
        """A node is about to run."""
        self._begin = self._alive.lately = self._alive.now

    def after(self, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        """It has run, and its result is among the values."""
        self.most = max(self.most, self._now + self._alive.lately - self._begin)
        self._change(values[node], 1)
        for other in self._gone.get(node, ()):
            self._change(values.pop(other, None), -1)

    def _change(self, value: Any, sign: int) -> None:
        """A variable takes a value, or lets it go."""
        for storage in {id(s): s for s in map(storage_of, tensors(value))}.values():
            if self._alive.counts(storage):
                before = self._count[id(storage)]
                self._count[id(storage)] += sign
                if 0 in (before, before + sign):
                    self._now += sign * storage.nbytes()
