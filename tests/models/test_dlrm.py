"""DLRM multiplies each pair of its features once."""

import itertools

import torch

from parcompiler.models import dlrm
from parcompiler.models.dlrm.model import Interaction


def test_each_pair_is_multiplied_once() -> None:
    x, *rows = torch.randn(4, 3, 8).unbind(0)
    found = Interaction()(x, rows)
    assert torch.equal(found[:, :8], x)
    pairs = [(a * b).sum(1) for a, b in itertools.combinations([x, *rows], 2)]
    wanted = torch.stack(pairs, 1).sort(1).values
    torch.testing.assert_close(found[:, 8:].sort(1).values, wanted)


def test_a_row_is_that_of_its_table() -> None:
    config = dlrm.PRESETS["tiny"]
    model, numbers = dlrm.DLRM(config), torch.randn(1, config.numbers)
    last = torch.tensor([[rows - 1 for rows in config.tables]])
    before = model(numbers, last)
    with torch.no_grad():
        for name, parameter in model.tables.named_parameters():
            assert name.endswith("weight")
            parameter[:-1] = 0.0
    assert torch.equal(model(numbers, last), before)
    assert not torch.equal(model(numbers, last - 1), before)
