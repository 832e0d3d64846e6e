"""Tensors of the vocabulary between the model, which has them whole, and ranks with padded rows.

model      [V, ...]                  checkpoints, gradients that are gathered
rank r     rows r k ... (r + 1) k    what is behind the last row of V is padding, and stays zero
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from parcompiler.pieces import own_rows, rows
from parcompiler.runtime.axis import in_memory
from parcompiler.runtime.channels import Channels
from parcompiler.runtime.program import RankProgram
from parcompiler.runtime.vocabulary import Vocabulary


class Rows:
    """Which rows of the tensors in `program.rows` this rank has."""

    def __init__(self, program: RankProgram) -> None:
        self._sizes = program.rows
        self._rank = program.rank
        self._ranks = program.grid.plane(program.coordinate.data)
        self._index = self._ranks.index(program.rank)

    def make(self, vocabulary: Callable[[int, int], Vocabulary]) -> Vocabulary:
        """The module of this rank."""
        return vocabulary(len(self._ranks), self._index)

    def unpadded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of this rank that the model has; any other tensor as it is."""
        if name not in self._sizes:
            return tensor
        span = own_rows(self._sizes[name], len(self._ranks), self._index)
        return tensor.narrow(self._dim(name, tensor), 0, span.size)

    def own(self, name: str, tensor: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        """The rows of this rank, if they are given with those of all; else what is given.

        `padded` is what the rank has of it.
        """
        size = self._sizes.get(name)
        if size is None or tensor.dim() != padded.dim():
            return tensor
        dim = self._dim(name, padded)
        if tensor.shape[dim] != size:
            return tensor
        span = own_rows(size, len(self._ranks), self._index)
        return tensor.narrow(dim, span.start, span.size)

    def gather(
        self,
        tensors: Mapping[str, torch.Tensor],
        found: dict[str, torch.Tensor] | None,
        channels: Channels,
    ) -> dict[str, torch.Tensor] | None:
        """`found`, the others, with these on rank 0: whole, on the CPU. A collective.

        The ranks of the first data coordinate send their rows one after another.
        """
        if 0 not in self._ranks:
            return found
        for name, size in self._sizes.items():
            if name not in tensors:
                continue
            padded = in_memory(tensors[name].detach())
            if found is None:
                channels.send_now(padded, 0)
            else:
                found[name] = self._joined(padded, size, self._dim(name, padded), channels)
        return found

    def _dim(self, name: str, padded: torch.Tensor) -> int:
        """The dimension of a tensor that its rows lie along: a bias may be [1, V] in the model."""
        return padded.shape.index(rows(self._sizes[name], len(self._ranks)))

    def _joined(self, own: torch.Tensor, size: int, dim: int, channels: Channels) -> torch.Tensor:
        """The whole on rank 0, from what the others send."""
        whole = torch.empty((*own.shape[:dim], size, *own.shape[dim + 1 :]), dtype=own.dtype)
        buffer = torch.empty_like(own)
        for index, rank in enumerate(self._ranks):
            piece = own if rank == self._rank else channels.receive_now(buffer, rank)
            span = own_rows(size, len(self._ranks), index)
            whole.narrow(dim, span.start, span.size).copy_(piece.narrow(dim, 0, span.size))
        return whole
