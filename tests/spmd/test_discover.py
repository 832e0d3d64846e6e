"""Rules found by execution are those that one would write."""

from typing import Any

import pytest
import torch

from parcompiler.spmd import P, R, S, Strategy
from parcompiler.spmd.call import NodeCall
from parcompiler.spmd.discover import discovered
from parcompiler.spmd.rules import strategies
from parcompiler.spmd.simulate import attempt, example
from tests.spmd.cases import aten, below, real, source


def splits(call: NodeCall) -> set[Strategy]:
    return {s for s in strategies(call.node, 2) if not s.is_replicated}


@pytest.mark.parametrize(
    "call",
    [
        example(aten.mm.default, real(2, 4), real(4, 6)),
        example(aten.mul.Tensor, real(2, 4), real(4)),
        example(aten.exp.default, real(2, 4)),
        example(aten.softmax.int, real(2, 4), -1),
        example(aten.transpose.int, real(2, 4), 0, 1),
        example(aten.sum.dim_IntList, real(2, 4), [1]),
    ],
    ids=lambda call: call.base,
)
def test_what_is_written_is_discovered(call: NodeCall) -> None:
    assert splits(call) <= set(discovered(call, 2))


def test_an_operator_without_a_rule_gets_one() -> None:
    call = example(aten.cosine_similarity.default, real(4, 6), real(4, 6))
    assert source(call.node, 2) == "discovered"
    assert splits(call) == {Strategy((S(0), S(0)), (S(0),))}


def test_large_operands_are_tried_on_small_ones() -> None:
    call = example(aten.cosine_similarity.default, real(128, 6, 64), real(128, 6, 64), -1)
    found = splits(call)
    assert Strategy((S(0), S(0)), (S(0),)) in found
    assert Strategy((S(1), S(1)), (S(1),)) in found
    assert Strategy((S(2), S(2)), (S(2),)) not in found
    assert not [s for s in strategies(call.node, 4) if s.outputs == (S(1),)]


def test_what_draws_or_reads_memory_by_numbers_is_not_tried() -> None:
    drawn = example(aten.rrelu_with_noise_functional.default, real(4), real(4))
    assert discovered(drawn, 2) == ()
    counted = example(aten.bincount.default, below(4, 8))
    assert source(counted.node, 2) == "replicated"


def test_what_fails_on_pieces_is_replicated() -> None:
    call = example(aten.linalg_inv.default, torch.eye(4).double())
    assert [s.inputs for s in strategies(call.node, 2)][1:] == [(R,)]
    assert P not in {p for s in strategies(call.node, 2) for p in s.outputs}


@pytest.mark.parametrize("rows", [2, 4])
def test_what_compares_with_numbers_is_tried_on_them(rows: int) -> None:
    """A target is 1 or -1; of any other number the loss is zero, to which all summands add up."""
    one, two = torch.randn(2, rows, 16).unbind()
    call = example(torch.ops.aten.cosine_embedding_loss.default, one, two, torch.ones(rows))
    assert discovered(call, 2) == ()


class Limited(torch.autograd.Function):
    """The value itself; backward cuts the gradient down to a norm."""

    LIMIT = 100

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,) = gradients
        scale: torch.Tensor = (Limited.LIMIT / gradient.norm()).clamp(max=1)
        return gradient * scale


@pytest.mark.parametrize(
    "call",
    [
        example(aten.renorm.default, real(4, 6), 2, 0, 100),
        example(Limited.apply, real(4, 6).requires_grad_()),
    ],
    ids=["values", "gradients"],
)
def test_what_cuts_down_large_numbers_is_tried_on_them(call: NodeCall) -> None:
    """Small ones are left as they are, in whatever pieces."""
    assert Strategy((S(1),), (S(1),)) not in discovered(call, 2)


def test_one_summand_that_comes_out_right_by_chance_makes_no_rule() -> None:
    call = example(aten.remainder.Tensor, real(), real())
    assert not [s for s in discovered(call, 2) if s.inputs == (P, R)]


def test_to_find_a_rule_leaves_random_numbers_alone() -> None:
    call = example(torch.ops.aten.mm.default, torch.ones(2, 4).double(), torch.ones(4, 3).double())
    before = torch.get_rng_state()
    attempt(call, (P, R), n=2)
    assert torch.equal(torch.get_rng_state(), before)
