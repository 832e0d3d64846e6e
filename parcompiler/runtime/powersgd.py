"""Gradients between data ranks as two factors of each matrix, with error feedback: PowerSGD.

    M = gradient + error                       [n, m], of each data rank
    P = orthogonal columns of the sum of M Q   [n, r], Q of the last step
    Q = the sum of M^T P                       [m, r]
    gradient = P Q^T,  error = M - P Q^T / d   the error is added to the next step's

Vogels et al. 2019, arXiv 1905.13727, algorithm 1 (as `powerSGD_hook` of DistributedDataParallel,
which works on that wrapper's buckets): (n + m) r numbers are sent instead of n m. Vectors, and
matrices whose factors are not smaller, are summed whole. Sums are in the order of the data ranks,
so that one process can repeat them to the bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import torch

from parcompiler.data_updates import is_factored
from parcompiler.runtime.axis import flattened, real, unflattened
from parcompiler.runtime.channels import Channels
from parcompiler.runtime.collective_queue import Pending


def first_factor(name: str, m: int, rank: int, like: torch.Tensor) -> torch.Tensor:
    """The initial Q [m, rank] of a gradient, the same on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(m, rank, generator=generator, dtype=torch.float64).to(like)


class PowerSGD:
    """The state of PowerSGD on a rank, by name of the gradient: `errors` [n, m] and `factors` Q."""

    def __init__(self, rank: int, channels: Channels) -> None:
        self._rank, self._channels = rank, channels
        self.errors: dict[str, torch.Tensor] = {}
        self.factors: dict[str, torch.Tensor] = {}

    def clear(self) -> None:
        """Forget all errors and factors."""
        self.errors.clear()
        self.factors.clear()

    def sum(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], ranks: tuple[int, ...]
    ) -> Pending:
        """Start summing the gradients of tensors over the data ranks, in place."""
        named = zip(names, tensors, strict=True)
        gradients = {name: t.grad for name, t in named if t.grad is not None}

        def start() -> tuple[None, None]:
            self._sum(gradients, ranks)
            return None, None

        assert self._channels.beside is not None
        return self._channels.beside.put(start)

    def _sum(self, gradients: dict[str, torch.Tensor], ranks: tuple[int, ...]) -> None:
        """Sum gradients: whole ones at once, matrices by factors."""
        wholes, matrices = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for name, gradient in gradients.items():
            if gradient.is_complex() or not is_factored(gradient.shape, self._rank):
                wholes[name] = gradient
                continue
            matrix = _wide(gradient).flatten(1)
            if name not in self.factors:
                self.factors[name] = first_factor(name, matrix.shape[1], self._rank, matrix)
            if name not in self.errors:
                self.errors[name] = torch.zeros_like(matrix)
            matrices[name] = matrix + self.errors[name]
        lefts = {name: matrix @ self.factors[name] for name, matrix in matrices.items()}
        self._exchange([*map(real, wholes.values()), *lefts.values()], ranks)
        lefts = {name: torch.linalg.qr(left).Q for name, left in lefts.items()}
        rights = {name: matrix.T @ lefts[name] for name, matrix in matrices.items()}
        self._exchange([*rights.values()], ranks)
        # Equal on all ranks. A step that is not finite may be skipped while the run goes on: its
        # state would spoil all later steps.
        finite = {name: right.isfinite().all() for name, right in rights.items()}
        for name, matrix in matrices.items():
            product = lefts[name] @ rights[name].T
            gradients[name].copy_(product.view(gradients[name].shape))
            matrix -= product.div_(len(ranks))
            error = self.errors[name]
            torch.where(finite[name], matrix, error, out=error)
            self.factors[name] = torch.where(finite[name], rights[name], self.factors[name])

    def _exchange(self, tensors: Sequence[torch.Tensor], ranks: tuple[int, ...]) -> None:
        """Sum tensors over the data ranks, in place, all at once."""
        if tensors:
            bucket = flattened(map(_wide, tensors))
            self._channels.sum_in_order(bucket, ranks)
            for tensor, piece in zip(tensors, unflattened(bucket, tensors), strict=True):
                tensor.copy_(piece)

    def states(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The state to save, by kind and name."""
        yield from ((f"error/{name}", tensor) for name, tensor in self.errors.items())
        yield from ((f"factor/{name}", tensor) for name, tensor in self.factors.items())

    def restore(self, key: str, tensor: torch.Tensor) -> None:
        """Restore a tensor of `states`."""
        kind, _, name = key.partition("/")
        (self.errors if kind == "error" else self.factors)[name] = tensor


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """A real tensor in float32, if it is in 16 bits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
