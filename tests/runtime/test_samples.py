"""Which samples each data rank takes: every one once an epoch, whatever is interrupted."""

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

import parcompiler as pc
from parcompiler.grid import Coordinate
from parcompiler.runtime import Input, RankProgram
from parcompiler.runtime.program import samples_of
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


class Placed(nn.Module):
    """Tokens at positions that all rows share; its logits, too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(9, 4), nn.Embedding(6, 4)
        self.head = nn.Linear(4, 9)

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.tokens(x) + self.places(places))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten()),
                "logits": logits}  # fmt: skip


def test_what_all_rows_share_is_no_sample(tmp_path: Path) -> None:
    data, places = torch.arange(120).reshape(20, 6) % 9, torch.arange(6).flip(0)[None]
    model = Placed()
    program = pc.compile(
        model, pc.Mesh(), {"x": data[:4], "places": places}, microbatches=2, outputs=["logits"],
        progress=False,
    )  # fmt: skip
    with program.worker() as worker:
        worker.set_optimizer(torch.optim.SGD, lr=0.0)
        own = next(iter(pc.Samples(len(data), worker)))
        assert len(own) == 8
        loss = worker.train_step({"x": data[own], "places": places.repeat(2, 1)})
        assert loss.item() == pytest.approx(model(data[own], places)["loss"].item())
        assert worker.sample_count == 8
        for rows, count in ((3, 1), (10, 1), (10, 3)):  # what is shared once, or by micro-batch
            found = worker.predict({"x": data[:rows], "places": places.repeat(count, 1)})
            assert found is not None
            torch.testing.assert_close(found["logits"], model(data[:rows], places)["logits"])
        with pytest.raises(pc.InputError, match="that all samples share, or one for each of the 3"):
            worker.predict({"x": data[:10], "places": places.repeat(2, 1)})
        save_file({"x": data, "places": places}, tmp_path / "data.safetensors")
        batch: Any = next(_batches(worker, tmp_path / "data.safetensors"))
        assert torch.equal(batch["x"], data[8:16])
        assert torch.equal(batch["places"], places.repeat(2, 1))
        drawn: Any = next(_batches(worker, None))
        assert (drawn["x"].shape, drawn["places"].shape) == ((8, 6), (2, 6))
        save_file({"x": data, "places": places.repeat(5, 1)}, tmp_path / "data.safetensors")
        with pytest.raises(pc.InputError, match=r"must have one row, .* share \(5 found\)"):
            next(_batches(worker, tmp_path / "data.safetensors"))


@pytest.mark.parametrize(
    ("shapes", "samples"),
    [
        ([(4, 6), (1, 6)], 4), ([(4, 6), (1, 1, 6, 6), ()], 4), ([(1, 6), (1, 6)], 1),
        ([(20, 3), (1,)], 1), ([(20, 3), (2, 9), (1, 2)], 1),
    ],
)  # fmt: skip
def test_a_sample_is_a_row_where_inputs_have_as_many(
    shapes: list[tuple[int, ...]], samples: int
) -> None:
    assert samples_of(Input(str(shape), shape, torch.float32) for shape in shapes) == samples


def test_random_samples_are_the_same_for_any_number_of_data_ranks() -> None:
    def batch(data: int) -> list[torch.Tensor]:
        ranks: list[Any] = [Rank(data, k, microbatches=4 // data, seen=24) for k in range(data)]
        batches: list[Any] = [next(_batches(rank, None)) for rank in ranks]
        assert all(one["f"].shape == () for one in batches)
        return [torch.cat([one["x"] for one in batches])]

    whole = batch(1)[0]
    assert whole.shape == (12, 2)
    assert torch.equal(whole, batch(2)[0])
    assert torch.equal(whole, batch(4)[0])
    assert len(whole.unique()) == 24
