"""Which samples each data rank takes: every one once an epoch, whatever is interrupted."""

from argparse import Namespace
from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import parcompiler as pc
from parcompiler.grid import Coordinate
from parcompiler.runtime import Input, RankProgram
from parcompiler.runtime.script import _batches


class Rank:
    """What of a worker says where it is in the data."""

    def __init__(self, data: int, rank: int, microbatches: int = 2, rows: int = 3, seen: int = 0):
        self.program = RankProgram(
            rank, data, "cpu", microbatches, "0", torch.float32, (0,), (), (), data=data,
            inputs={"x": Input("x", (rows, 2), torch.float32), "f": Input("f", (), torch.float32)},
        )  # fmt: skip
        assert self.program.coordinate == Coordinate(0, rank, 0)
        self.data_rank, self.data_ranks, self.sample_count, self.seed = rank, data, seen, 0


def steps(count: int, number: int, data: int, seen: int, **options: Any) -> list[list[list[int]]]:
    """The samples of some steps, by step and data rank."""
    ranks: list[Any] = [Rank(data, k, seen=seen) for k in range(data)]
    samples = [islice(pc.Samples(count, rank, **options), number) for rank in ranks]
    return [list(step) for step in zip(*samples, strict=True)]


def test_runs_that_go_on_with_other_data_ranks_leave_nothing_out_and_take_nothing_twice() -> None:
    count, seen, taken = 50, 0, Counter[int]()
    orders = []
    for data, number in ((4, 3), (3, 4), (1, 3), (2, 5), (4, 7)):
        for step in steps(count, number, data, seen):
            assert all(len(own) == 6 for own in step)
            orders += [index for own in step for index in own]
            taken.update(index for own in step for index in own)
            seen += 6 * data
            least = seen // count
            assert {taken[index] for index in range(count)} <= {least, least + 1}
    assert len(orders) == seen
    first, second = orders[:count], orders[count : 2 * count]
    assert sorted(first) == sorted(second) == [*range(count)]
    assert first != second != [*range(count)]


def test_the_samples_of_a_step_are_the_same_for_any_number_of_data_ranks() -> None:
    def rows(data: int) -> list[list[int]]:
        ranks: list[Any] = [Rank(data, k, microbatches=12 // data) for k in range(data)]
        samples = [islice(pc.Samples(100, rank, seed=7), 5) for rank in ranks]
        return [[n for own in step for n in own] for step in zip(*samples, strict=True)]

    assert rows(1) == rows(2) == rows(3) == rows(4)


def test_without_shuffle_the_order_is_that_of_the_dataset() -> None:
    found = steps(8, 2, 1, 0, shuffle=False)
    assert found == [[[0, 1, 2, 3, 4, 5]], [[6, 7, 0, 1, 2, 3]]]


def test_a_loader_that_fetches_ahead_goes_on_where_training_is() -> None:
    rank: Any = Rank(2, 1)
    data = torch.arange(40)
    samples = pc.Samples(40, rank, shuffle=False)
    loader: Any = DataLoader(data, batch_sampler=samples)  # type: ignore[arg-type]
    fetched = iter(loader)
    assert [next(fetched).tolist()[0] for _ in range(3)] == [6, 18, 30]
    rank.sample_count = 12  # one step alone was trained
    assert next(iter(loader)).tolist() == [18, 19, 20, 21, 22, 23]


def test_data_smaller_than_a_step_is_refused() -> None:
    rank: Any = Rank(2, 0)
    with pytest.raises(
        pc.InputError, match=r"fewer samples than a step takes \(11 of 12: 6 for each"
    ):
        pc.Samples(11, rank)


def test_random_samples_are_the_same_for_any_number_of_data_ranks() -> None:
    def batch(data: int) -> list[torch.Tensor]:
        ranks: list[Any] = [Rank(data, k, microbatches=4 // data, seen=24) for k in range(data)]
        batches: list[Any] = [next(_batches(rank, Namespace(data=None))) for rank in ranks]
        assert all(one["f"].shape == () for one in batches)
        return [torch.cat([one["x"] for one in batches])]

    whole = batch(1)[0]
    assert whole.shape == (12, 2)
    assert torch.equal(whole, batch(2)[0])
    assert torch.equal(whole, batch(4)[0])
    assert len(whole.unique()) == 24
