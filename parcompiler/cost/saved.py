"""The memory that autograd keeps between a forward and its backward."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Self

import torch
from torch.autograd.graph import saved_tensors_hooks

from parcompiler.cost.alive import Alive
from parcompiler.cost.stand_in import storage_of


class _Kept:
    """One tensor that a node of the autograd graph keeps; it dies with the node."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Saved:
    """A context that notes what autograd saves within it.

    Operators whose results are thrown away save nothing that lasts: ask for the `storages` when
    only the block's outputs are still alive.
    """

    def __init__(self, alive: Alive | None = None) -> None:
        self.most = 0  # bytes alive until the last tensor was saved
        self._alive = alive
        self._kept: list[weakref.ref[_Kept]] = []
        self._hooks = saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, traceback)

    def storages(self) -> set[torch.UntypedStorage]:
        """Every storage that is still kept, once."""
        alive = (reference() for reference in self._kept)
        return {storage_of(kept.tensor) for kept in alive if kept is not None}

    def _pack(self, tensor: torch.Tensor) -> _Kept:
        if self._alive is not None:
            self.most = self._alive.most
        kept = _Kept(tensor.detach())  # an output would keep its own node, and so itself, alive
        self._kept.append(weakref.ref(kept))
        return kept
