"""How many bytes of the tensors that operators make are alive at once.

>>> from parcompiler.cost.stand_in import stand_in
>>> alive = Alive()
>>> x = stand_in(torch.empty(8, device="meta"))
>>> alive.note((x, x.view(2, 4)))
>>> alive.now, alive.most
(32, 32)
>>> del x
>>> alive.now, alive.most
(0, 32)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from parcompiler.cost.stand_in import storage_of, tensors


class Alive:
    """Bytes of the storages that were noted and still exist, and the most there were.

    Views share a storage, which counts once. What comes from `outside` does not count.
    """

    def __init__(self, outside: Iterable[torch.UntypedStorage] = ()) -> None:
        self.now = self.most = 0
        self.lately = 0  # the most since somebody set this to `now`
        self.kept = self.fullest = 0  # what is gone but would stay, and the most with it
        self.given = self.held = 0  # of what a caller holds, what is gone here; the most with it
        self._outside = {id(storage): storage for storage in outside}
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def note(self, result: Any) -> None:
        """Count what an operator made; what it only passes on is known already."""
        for tensor in tensors(result):
            storage = storage_of(tensor)
            key = id(storage)
            if key not in self._known and key not in self._outside:
                self._add(key, storage)

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is among those that are counted."""
        return id(storage) in self._known

    def keep(self, nbytes: int) -> None:
        """Something is let go that stays the first time: a gradient that is added to none."""
        self.kept += nbytes

    def hold(self, tensor: torch.Tensor) -> None:
        """A caller may hold a tensor that was noted for longer than it is needed here."""
        storage = storage_of(tensor)
        nbytes = storage.nbytes()

        def ended() -> None:
            self.given += nbytes

        weakref.finalize(storage, ended).atexit = False

    def restart(self) -> None:
        """Forget what there was at most."""
        self.most = self.fullest = self.held = self.now
        self.kept = self.given = 0

    def _add(self, key: int, storage: torch.UntypedStorage) -> None:
        """Count a storage until it ends."""
        nbytes = storage.nbytes()

        def ended(_: object) -> None:
            del self._known[key]
            self.now -= nbytes

        self._known[key] = weakref.ref(storage, ended)
        self.now += nbytes
        self.most = max(self.most, self.now)
        self.lately = max(self.lately, self.now)
        self.fullest = max(self.fullest, self.now + self.kept)
        self.held = max(self.held, self.now + self.given)
