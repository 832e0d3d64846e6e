"""Every conversion keeps the value, and gives its source the gradient that the types say."""

from collections.abc import Callable, Mapping

import pytest
import torch

from parcompiler.pieces import piece
from parcompiler.spmd import I, P, Placement, R, S
from parcompiler.spmd.conversions import TABLE, Action, Conversion, conversion, moved
from parcompiler.spmd.placement import join, take
from parcompiler.spmd.simulate import agrees, dealt

Parts = list[torch.Tensor]
DUAL = {R: P, P: I, I: I}


def padded(part: torch.Tensor, rank: int, n: int, size: int, dim: int) -> torch.Tensor:
    """A piece with zeros around it."""
    own, shape = piece(size, n, rank), list(part.shape)
    shape[dim] = size
    whole = part.new_zeros(shape)
    whole.narrow(dim, own.start, own.size).copy_(part)
    return whole


def carried_out(action: Action, parts: Parts, here: Placement, there: Placement) -> Parts:
    """An action on what n ranks hold; pieces are those of `here` before and `there` after it."""
    n = len(parts)

    def total() -> torch.Tensor:
        return torch.stack(parts).sum(0)

    actions: Mapping[Action, Callable[[], Parts]] = {
        "nothing": lambda: parts,
        "all-reduce": lambda: [total()] * n,
        "all-gather": lambda: [join(parts, here)] * n,
        "reduce-scatter": lambda: [take(total(), there, n, rank) for rank in range(n)],
        "all-to-all": lambda: [take(join(parts, here), there, n, rank) for rank in range(n)],
        "take": lambda: [take(part, there, n, rank) for rank, part in enumerate(parts)],
        "pad": lambda: [padded(part, r, n, 5, here.dim) for r, part in enumerate(parts)],
        "first": lambda: [part * (rank == 0) for rank, part in enumerate(parts)],
    }
    return actions[action]()


def typed(kind: str, dim: int) -> Placement:
    return S(dim) if kind == "S" else Placement(kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.source}-{row.target}")
def test_a_conversion_keeps_the_value_and_turns_the_gradient(row: Conversion, n: int) -> None:
    torch.manual_seed(0)
    source, target = typed(row.source, 0), typed(row.target, 1)
    value, gradient = torch.randn(2, 5, 5, dtype=torch.float64)
    after = carried_out(row.forward, dealt(value, source, n), source, target)
    assert agrees(after, target, value)
    come, go = DUAL.get(target, target), DUAL.get(source, source)
    back = carried_out(row.backward, dealt(gradient, come, n), target, source)
    assert agrees(back, go, gradient)


def test_what_is_replicated_by_chance_is_not_converted() -> None:
    assert conversion(R, I) is None
    assert conversion(R, P) is None
    assert conversion(S(0), P) is None


def test_without_a_gradient_both_replicated_types_are_one_and_nothing_comes_back() -> None:
    for target in (I, R, P, S(0)):
        found = conversion(R, target, differentiable=False)
        assert found is not None
        assert found.backward == "nothing"
        assert found.forward in ("nothing", "take", "first")


def test_the_same_type_costs_nothing() -> None:
    for placement in (R, I, P, S(1)):
        row = conversion(placement, placement)
        assert row is not None
        assert (row.forward, row.backward) == ("nothing", "nothing")
        assert moved("nothing", 100, 4) == 0.0


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    for n in (1, 2, 4, 8):
        parts = moved("reduce-scatter", 1e6, n) + moved("all-gather", 1e6, n)
        assert moved("all-reduce", 1e6, n) == parts
        assert moved("all-to-all", 1e6, n) <= parts / 2
