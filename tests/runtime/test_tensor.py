"""Tensor ranks: conversions, split operators and draws on real processes, in float64."""

import json
from functools import cache

import pytest

from parcompiler import runtime
from parcompiler.errors import LaunchError
from tests.distributed import forked
from tests.runtime import along_axis

NAMES = [f"{name} n={n}" for name, _ in along_axis.cases() for n in (2, 4)]


@cache
def faults() -> dict[str, str]:
    """What is wrong, by case: one start of four processes for all of them."""
    text = forked.run(4, along_axis.main)
    found: dict[str, str] = json.loads(next(line for line in text.splitlines() if line[:1] == "{"))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_ranks_compute_what_the_whole_is(name: str) -> None:
    assert faults()[name] == ""


def test_a_layer_in_pieces_says_that_it_needs_a_worker() -> None:
    with pytest.raises(LaunchError, match="called outside a Worker"):
        runtime.piece(7)
