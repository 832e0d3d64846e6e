"""Which samples of the data each data rank takes in each step: a count, and a rule.

The count is `worker.sample_count`: the samples that all data ranks together have trained on. The
rule, for two data ranks with two samples each:

    stream       0 1 2 3   4 5 6 7   8 9 ...     one epoch after another, each in its own order
    step            1         2         3
    data rank    0 0 1 1   0 0 1 1   0 0 ...

A resumed run takes the samples from the count on: none is seen twice, none is left out, whatever
the number of data ranks was before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Sampler

from parcompiler.errors import InputError
from parcompiler.runtime.rng import mixed

if TYPE_CHECKING:
    from parcompiler.runtime.worker import Worker


class Samples(Sampler[list[int]]):
    """The indices of this data rank's batches from now on, for ever: the `batch_sampler` of a
    `torch.utils.data.DataLoader` over a dataset of `count` samples.

    It begins at `worker.sample_count`, where training is: iterate after `worker.load`. That counts
    what was trained on, so a loader may fetch ahead, in processes of its own. Each epoch has
    another order, by `seed`; without `shuffle` it is that of the dataset. A step may begin in one
    epoch and end in the next, so that every epoch has each sample once. Give all ranks, and a
    resumed run, the same arguments. A sample is a row of a batch (a micro-batch, where the inputs
    have different numbers of rows). An input [1, ...] of a micro-batch beside others of more rows,
    as positions are, is shared by these and no sample. Raises InputError for fewer samples than a
    step takes.
    """

    def __init__(self, count: int, worker: Worker, shuffle: bool = True, seed: int = 0) -> None:
        program = worker.program
        if count < program.samples_of_step:
            needed, each = program.samples_of_step, program.samples_of_step // program.grid.batches
            message = (
                f"the data has fewer samples than a step takes ({count} of {needed}: {each} for "
                "each data rank): give more, or compile for fewer micro-batches"
            )
            raise InputError(message)
        self._count, self._worker = count, worker
        self._shuffle, self._seed = shuffle, seed
        self._orders: dict[int, torch.Tensor] = {}  # of the epochs that a step is in

    def __iter__(self) -> Iterator[list[int]]:
        """The indices of each step's batch on this data rank."""
        for places in positions(self._worker):
            yield [self._index(position) for position in places]

    def _index(self, position: int) -> int:
        """The index in the dataset of the sample at a position of the stream."""
        epoch, place = divmod(position, self._count)
        if not self._shuffle:
            return place
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(mixed(self._seed, epoch))
            self._orders = {k: order for k, order in self._orders.items() if k == epoch - 1}
            self._orders[epoch] = torch.randperm(self._count, generator=generator)
        return int(self._orders[epoch][place])


def positions(worker: Worker) -> Iterator[range]:
    """The positions in the stream of this data rank's samples, for each step from now on."""
    program = worker.program
    each = program.samples_of_step // program.grid.batches
    start = worker.sample_count + worker.data_rank * each
    while True:
        yield range(start, start + each)
        start += program.samples_of_step
