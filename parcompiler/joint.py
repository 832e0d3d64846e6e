"""The original model on several data ranks whose SyncBatchNorms count the batches of all.

A copy of the model for each rank runs on its micro-batch, in a thread of its own, one at a time:

    rank 0   ──► norm ╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌► norm of the joined rows ──► loss
    rank 1            ──► norm ╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌► norm ──► loss

At a norm a rank leaves its rows and lets the next one run; when it is its turn again all have come
as far, and it takes its rows of the plain batch norm of all rows. Autograd sees one graph of all
ranks, and one backward gives the gradients of the mean of their losses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from parcompiler.capture.synchronized import alone, computing_as
from parcompiler.pool import Outcome
from parcompiler.reference import Original

Losses = Sequence[Callable[[], torch.Tensor]]


def joined(
    originals: Sequence[Original], batch: Mapping[str, torch.Tensor], count: int, rate: float
) -> Outcome:
    """One step on `count` micro-batches, of which each of the data ranks has as many.

    Mean loss, its gradients, and the state after gradient descent: buffers are the first rank's.
    """
    first, each = originals[0], count // len(originals)
    found: list[torch.Tensor] = []
    for i in range(each):
        tasks = [partial(_loss, own, batch, r * each + i) for r, own in enumerate(originals)]
        with first.computing():  # for all threads: they end in another order than they began
            losses = _Lockstep(tasks).run()
            torch.autograd.backward(torch.stack(losses).sum() * (first.scale / count))
        found += [loss.detach() for loss in losses]
    for name, parameter in first.parameters.items():
        grads = [own.parameters[name].grad for own in originals]
        present = [grad for grad in grads if grad is not None]
        if present:
            parameter.grad = torch.stack(present).sum(0)
    gradients, mean = first.gradients(), torch.stack(found).mean().reshape(1)
    return Outcome(mean, gradients, first.descended(rate), first.scale)


def _loss(original: Original, batch: Mapping[str, torch.Tensor], i: int) -> torch.Tensor:
    """The loss of micro-batch `i`, in the precision of the model."""
    with original.computing():  # what torch keeps for each thread
        return original.loss(batch, i)


class _Lockstep:
    """Functions that run one at a time, each to the next norm; a turn goes around."""

    def __init__(self, functions: Losses) -> None:
        self._functions = functions
        self._turns = [threading.Semaphore(0) for _ in functions]
        self._rows: list[dict[int, torch.Tensor]] = []  # of the norms, in order, by rank
        self._place = threading.local()  # `rank`, and the number of `norms` that it has come to
        self._running = list(range(len(functions)))
        self._results: dict[int, torch.Tensor] = {}
        self._error: BaseException | None = None

    def run(self) -> list[torch.Tensor]:
        """Their results; what the first one that fails has raised."""
        ranks = range(len(self._functions))
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
        """The life of one thread."""
        self._place.rank, self._place.norms = rank, 0
        self._turns[rank].acquire()
        try:
            if self._error is None:
                self._results[rank] = self._functions[rank]()
        except BaseException as error:  # raised again by `run`
            self._error = self._error or error
        finally:
            self._pass_on(ended=True)

    def _pass_on(self, *, ended: bool = False) -> None:
        """Let the next one run that has not ended: this one again when there is no other."""
        place = self._running.index(self._place.rank)
        following = self._running[(place + 1) % len(self._running)]
        if ended:
            self._running.pop(place)
        self._turns[following].release()

    def _norm(self, norm: nn.SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
        """A rank's rows of the batch norm of the rows of all."""
        if not norm.training:
            return alone(norm, x)
        rank, number = self._place.rank, self._place.norms
        self._place.norms += 1
        if number == len(self._rows):
            self._rows.append({})
        rows = self._rows[number]
        rows[rank] = x.clone()  # what is done to it in place comes after the norm
        self._pass_on()
        self._turns[rank].acquire()
        if self._error is not None or len(rows) < len(self._turns):
            message = "another data rank has not come to this SyncBatchNorm"
            raise RuntimeError(message)
        parts = [rows[r] for r in range(len(self._turns))]
        before = sum(part.shape[0] for part in parts[:rank])
        return alone(norm, torch.cat(parts)).narrow(0, before, x.shape[0]).clone()
