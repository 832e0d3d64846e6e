"""The bound of integer inputs: tables they index, classes they name, else the example."""

import torch
import torch.nn.functional as F
from torch import nn

from parcompiler.capture import capture
from parcompiler.capture.bounds import high_of_example
from tests.distributed.models import ROWS, classes


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 4)
        self.places = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 5)

    def forward(
        self, words: torch.Tensor, both: torch.Tensor, free: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        x = self.words(words[:, :3].contiguous()) + self.places(both.view(ROWS, 3))
        x = x + self.words(both) * free[:, None, None]
        return F.cross_entropy(self.head(x.mean(1)), labels.view(-1))


def test_the_smallest_table_that_an_input_indexes_bounds_it() -> None:
    inputs = {
        "words": classes(2, 6),
        "both": classes(2, 3),
        "free": classes(4),
        "labels": classes(2, 1),
    }
    found = {item.key: item.high for item in capture(Model(), inputs).inputs}
    assert found == {"words": 11, "both": 7, "free": int(inputs["free"].max()) + 1, "labels": 5}


class Columns(nn.Module):
    """One input with a column for each of two tables."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(11, 4), nn.Embedding(3, 4)])

    def forward(self, both: torch.Tensor) -> torch.Tensor:
        first, second = both.unbind(1)
        total: torch.Tensor = (self.tables[0](first) * self.tables[1](second)).sum()
        return total


def test_columns_of_an_input_are_bounded_by_the_smallest_of_their_tables() -> None:
    both = torch.stack([classes(11), classes(3)], dim=1)
    assert [item.high for item in capture(Columns(), {"both": both}).inputs] == [3]


def test_floats_and_tensors_without_values_have_none() -> None:
    assert high_of_example(torch.ones(2)) is None
    assert high_of_example(torch.ones(2, dtype=torch.long, device="meta")) is None
    assert high_of_example(torch.zeros(2, dtype=torch.long)) == 1
