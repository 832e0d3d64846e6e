"""Sums of gradients over ranks: started as soon as they are final, waited for at the end.

    last BACKWARD    w3 w2 | w1 w0                  gradients, in the order they become final
    bucket_0               ╘═ w3 + w2 ══════╗       [1] started within the backward
    bucket_1                       ╘═ w1 + w0 ══╗
    REDUCE_GRADIENTS lines           ·          ║   [2] sums not started yet start here
    end of the step                             ╩   waits for all of them

A bucket is one flat tensor. The gradients are copied into it once, and then are views of it, so
that nothing is copied back. Sums start in the order of the list, whatever becomes final first, so
that the ranks of a group agree. Where data ranks keep pieces of gradients, this happens in every
backward, and a sum waits for the one before it, so that few whole gradients are in memory. [1] A
gradient is final when autograd has added the last micro-batch to it; [2] with a split backward, or
for a parameter without a gradient, only the list tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from parcompiler.instruction import BACKWARDS, ROWS, Instruction, Kind
from parcompiler.runtime.collective_queue import Pending
from parcompiler.runtime.mixed_precision import wide_dtype
from parcompiler.runtime.powersgd import PowerSGD
from parcompiler.runtime.program import RankProgram
from parcompiler.runtime.zero import DataParts, contiguous_gradient, flat

Work = tuple[int, Any]  # the number of a sum, and its work


class Summing(Protocol):
    """Adds up tensors over ranks, as the channels do."""

    def sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Any: ...

    def sum_rows(self, table: torch.Tensor, most: int, ranks: tuple[int, ...]) -> Any: ...


class Reduction:
    """The sums of one rank, by their number in its list; `tensors` are this rank's, by name. With
    `parts` each data rank gets the sums of the rows that it updates. `awaits` tells whether a
    product for a tensor's gradient is deferred, so that it is not final when autograd is done."""

    def __init__(
        self,
        program: RankProgram,
        tensors: Mapping[str, torch.Tensor],
        parts: DataParts | None = None,
        powersgd: PowerSGD | None = None,
        awaits: Callable[[torch.Tensor], bool] = lambda _: False,
    ) -> None:
        self._parts, self._powersgd = parts, powersgd
        self._pieces = parts is not None and program.zero > 1
        self._rows = program.row_gradients
        lines = program.instructions
        self.lines = [line for line in lines if line.kind is Kind.REDUCE_GRADIENTS]
        self._names = [program.summed[line.value or ""] for line in self.lines]
        self._tensors = [[tensors[name] for name in names] for names in self._names]
        self._tied = [line.value in program.tied for line in self.lines]
        self._number = {line: k for k, line in enumerate(self.lines)}
        self._behind = _behind(lines, self._number, program)
        self._watched: dict[int, int] = {}  # sum of each tensor (by id) that may become final
        self._pending: list[int] = []  # number of tensors of each sum that are not final
        self._works: list[Work] = []
        self._started = 0
        self._channels: Summing | None = None
        self._awaits = awaits

    def begin(self, channels: Summing) -> None:
        """Begin a step: no gradient is final."""
        self._channels = channels
        self._pending = list(map(len, self._tensors))
        self._works = []
        self._started = 0

    @contextmanager
    def watching(self, backward: Instruction) -> Iterator[None]:
        """Context of `backward`: sums of gradients that it makes final may start."""
        pairs = [(k, t) for k in self._behind.get(backward, ()) for t in self._tensors[k]]
        self._watched = {id(tensor): k for k, tensor in pairs}
        hooks = [t.register_post_accumulate_grad_hook(self._accumulated) for _, t in pairs]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._watched = {}

    def start(self, line: Instruction) -> None:
        """Start the sums up to that of a line, unless they have been."""
        while self._started <= self._number[line]:
            self._start(self._started)

    def settle(self) -> None:
        """Add finished sums to the gradients of pieces, which frees the whole ones."""
        while self._pieces and self._works and self._works[0][1].is_completed():
            self._works.pop(0)[1].wait()

    def wait(self) -> Iterator[Instruction]:
        """Wait for the sums, one after another: yields each, and then waits for it."""
        works, self._works = self._works, []
        for k, work in works:
            yield self.lines[k]
            work.wait()

    def _accumulated(self, tensor: torch.Tensor) -> None:
        """Hook: autograd is done with a tensor in a backward; also called where it added
        nothing."""
        if not self._awaits(tensor):
            self.became_final(tensor)

    def became_final(self, tensor: torch.Tensor) -> None:
        """The last summand of a backward has been added to the gradient of a tensor."""
        k = self._watched.get(id(tensor))
        if k is not None:
            self._pending[k] -= 1
            while self._started < len(self._pending) and not self._pending[self._started]:
                self._start(self._started)

    def _start(self, k: int) -> None:
        """Start a sum."""
        assert self._channels is not None
        if self._pieces:  # so that few whole gradients exist, and ties come after all pieces
            for _, earlier in self._works:
                earlier.wait()
            self._works.clear()
        with torch.no_grad():
            tensors, names = self._tensors[k], self._names[k]
            work: Pending
            if self._parts is not None and not self._tied[k]:
                work = self._parts.scatter(names)
            elif self._parts is not None and self._pieces:
                work = self._parts.sum_copies(*names)
            elif self._powersgd is not None and not self._tied[k]:
                work = self._powersgd.sum(names, tensors, self.lines[k].ranks)
            elif (self.lines[k].value or "").startswith(ROWS):
                work = self._channels.sum_rows(
                    tensors[0], self._rows[names[0]], self.lines[k].ranks
                )
            else:
                gradients = contiguous_gradient(tensors[0]) if self._tied[k] else _flat(tensors)
                work = self._channels.sum(gradients, self.lines[k].ranks)
                if self._parts is not None:
                    self._parts.take_gradients(names)
            self._works.append((k, work))
        self._started += 1


def _behind(
    lines: Sequence[Instruction], number: Mapping[Instruction, int], program: RankProgram
) -> dict[Instruction, list[int]]:
    """For each whole backward, the numbers of the sums between it and the next backward."""
    behind: dict[Instruction, list[int]] = {}
    latest: Instruction | None = None
    for line in lines:
        if line.kind in BACKWARDS or line.kind is Kind.BACKWARD_WEIGHT:
            latest = line
        elif line.value in program.buckets and line in number and latest is not None:
            if latest.kind is Kind.BACKWARD:
                behind.setdefault(latest, []).append(number[line])
    return behind


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The gradients of a bucket as one tensor; from now on they are views of it.

    A parameter without a gradient has none on any data rank, and gets none.
    """
    if len(tensors) == 1 and tensors[0].grad is not None:
        return contiguous_gradient(tensors[0])
    bucket, views = flat(tensors, wide_dtype(tensors[0]))
    for tensor, view in zip(tensors, views, strict=True):
        if tensor.grad is not None:
            tensor.grad = view
    return bucket
