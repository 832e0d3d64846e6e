"""The synchronized batch norm reference: the model on the batches of several data ranks at once.

The model runs on the micro-batch of each rank in a separate thread, one thread at a time:

    rank 0   ──► norm ╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌► norm of all rows ──► loss
    rank 1            ──► norm ╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌► norm ──► loss

At a norm a rank stores its rows and lets the next one run; at its next turn all have reached the
norm, and it takes its rows of the plain batch norm of all rows. Each rank has its own buffers,
which the model has during that rank's turn. Autograd sees one graph of all ranks, and one backward
gives the gradients of the mean of their losses.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from parcompiler.capture.synchronized import alone, computing_as
from parcompiler.verification.pool import Outcome
from parcompiler.verification.reference import Optimizer, Original

Buffers = Sequence[dict[str, torch.Tensor | None]]  # of each module


def accumulated_together(
    original: Original,
    batch: Mapping[str, torch.Tensor],
    count: int,
    optimizer: Optimizer,
    ranks: int,
) -> Outcome:
    """One step on `count` micro-batches, equally many for each of the data `ranks`.

    Mean loss, its gradients, and the state after the step: buffers are the first rank's.
    """
    each = count // ranks
    modules = [*original.whole.modules()]
    buffers = [_copies(modules) if r else [m._buffers for m in modules] for r in range(ranks)]
    means: list[torch.Tensor] = []
    with original.accumulating():
        for i in range(each):
            with original.computing():  # threads end in another order
                numbers = [r * each + i for r in range(ranks)]
                losses = _Lockstep(original, batch, numbers, buffers).run()
                torch.autograd.backward(torch.stack(losses).sum() * (original.scale / count))
            means += [loss.detach() for loss in losses]
    _set_buffers(modules, buffers[0])
    gradients, mean = original.gradients(), torch.stack(means).mean().reshape(1)
    return Outcome(mean, gradients, original.stepped(optimizer), original.scale)


def _copies(modules: Sequence[nn.Module]) -> Buffers:
    """Copies of the buffers of each module; shared ones stay shared."""
    made: dict[int, torch.Tensor] = {}

    def copy(buffer: torch.Tensor | None) -> torch.Tensor | None:
        return None if buffer is None else made.setdefault(id(buffer), buffer.clone())

    return [{name: copy(buffer) for name, buffer in m._buffers.items()} for m in modules]


def _set_buffers(modules: Sequence[nn.Module], buffers: Buffers) -> None:
    """Give modules these buffers."""
    for module, values in zip(modules, buffers, strict=True):
        module._buffers = values


class _Lockstep:
    """The losses of some micro-batches, one for each rank, which has `buffers` of its own.

    They are computed one at a time, each to the next norm, in turn.
    """

    def __init__(
        self,
        original: Original,
        batch: Mapping[str, torch.Tensor],
        microbatches: Sequence[int],
        buffers: Sequence[Buffers],
    ) -> None:
        self._modules = [*original.whole.modules()]
        self._original, self._batch, self._microbatches = original, batch, microbatches
        self._buffers = buffers
        self._turns = [threading.Semaphore(0) for _ in microbatches]
        self._rows: list[dict[int, torch.Tensor]] = []  # of the norms, in order, by rank
        self._place = threading.local()  # `rank`, and the number of `norms` reached
        self._running = list(range(len(microbatches)))
        self._results: dict[int, torch.Tensor] = {}
        self._error: BaseException | None = None

    def run(self) -> list[torch.Tensor]:
        """The losses. Raises the error of the first rank that fails."""
        ranks = range(len(self._microbatches))
        threads = [threading.Thread(target=self._follow, args=(rank,)) for rank in ranks]
        with torch.random.fork_rng(devices=[]), computing_as(self._norm):
            for thread in threads:
                thread.start()
            self._turns[0].release()
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error
        return [self._results[rank] for rank in ranks]

    def _follow(self, rank: int) -> None:
        """Body of the thread of a rank."""
        self._place.rank, self._place.norms = rank, 0
        self._wait()
        try:
            if self._error is None:
                with self._original.computing():  # modes are thread-local
                    self._results[rank] = self._original.loss(self._batch, self._microbatches[rank])
        except BaseException as error:  # raised again by `run`
            self._error = self._error or error
        finally:
            self._pass_on(ended=True)

    def _pass_on(self, *, ended: bool = False) -> None:
        """Let the next running rank go on; it may be this one."""
        place = self._running.index(self._place.rank)
        following = self._running[(place + 1) % len(self._running)]
        if ended:
            self._running.pop(place)
        self._turns[following].release()

    def _wait(self) -> None:
        """Wait for the turn of this rank, and give the model its buffers."""
        self._turns[self._place.rank].acquire()
        _set_buffers(self._modules, self._buffers[self._place.rank])

    def _norm(self, norm: nn.SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
        """Batch norm of the rows of all ranks; returns those of this rank."""
        if not norm.training:
            return alone(norm, x)
        rank, number = self._place.rank, self._place.norms
        self._place.norms += 1
        if number == len(self._rows):
            self._rows.append({})
        rows = self._rows[number]
        rows[rank] = x.clone()  # later updates in place must not change it
        self._pass_on()
        self._wait()
        if self._error is not None or len(rows) < len(self._turns):
            message = "another data rank has not come to this SyncBatchNorm"
            raise RuntimeError(message)
        parts = [rows[r] for r in range(len(self._turns))]
        before = sum(part.shape[0] for part in parts[:rank])
        return alone(norm, torch.cat(parts)).narrow(0, before, x.shape[0]).clone()
