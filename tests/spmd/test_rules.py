"""Every written rule holds: pieces computed locally and put together are the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from parcompiler.pieces import piece
from parcompiler.spmd import I, P, R, S, Strategy, context, strategies
from parcompiler.spmd.call import NodeCall
from parcompiler.spmd.placement import take
from parcompiler.spmd.rules import RULES
from parcompiler.spmd.simulate import example, faults
from tests.spmd import cases, layers, shapes
from tests.spmd.cases import aten, real

CASES = {**cases.CASES, **shapes.CASES, **layers.CASES}
# Nothing to compare: memory that was not written, or other random numbers on every rank; and what
# takes the same arguments as another (a kernel that the test's machine may lack).
UNCOMPARED = {"empty", "empty_like", "new_empty", "bernoulli", "rand_like", "randn_like",
              "randint_like", "alpha_dropout", "_grouped_mm"}  # fmt: skip
SIZES = st.sampled_from((4, 2, 3, 1))
SEGMENTS = ((4, 4), (8, 8), (4, 8), (8, 4), (4, 4, 4), (8, 8, 8), (1, 3))


def split(call: NodeCall, n: int) -> tuple[Strategy, ...]:
    """All strategies, of calls in which gradients go where the call says."""
    names = {o.node.name for o in call.operands if o.differentiable} | {call.node.name}
    found = strategies(call.node, n, differentiable=names, segments=SEGMENTS)
    return found


def test_every_written_rule_has_cases() -> None:
    of_runtime = set(context.RULES)  # other ranks take part: tests/distributed/test_context.py
    assert set(RULES) - UNCOMPARED - of_runtime == set(CASES)


@pytest.mark.parametrize("name", sorted(CASES))
@settings(
    max_examples=3,
    derandomize=True,
    database=None,
)
@given(sizes=st.tuples(SIZES, SIZES, SIZES, SIZES))
def test_pieces_make_up_the_whole(name: str, sizes: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    for case in CASES[name]:
        call = case(*sizes)
        for n in (2, 4):
            for strategy in split(call, n):
                assert faults(call, strategy, n) == ()


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", sorted(set(CASES) - {"where"}))
def test_every_rule_splits_something(name: str, n: int) -> None:
    torch.manual_seed(0)
    found = [s for case in CASES[name] for s in split(case(4, 4, 4, 4), n)]
    assert any(not strategy.is_replicated for strategy in found)


def linear() -> NodeCall:
    return example(aten.linear.default, real(2, 3, 4), real(8, 4), real(8))


@pytest.mark.parametrize(
    "wrong",
    [
        Strategy((S(2), S(1), R), (P,)),  # the bias counts n times
        Strategy((S(2), S(1), P), (R,)),
        Strategy((I, S(0), S(0)), (S(2),)),  # the gradient of the input is partial
        Strategy((S(0), I, R), (S(0),)),
        Strategy((R, R, R), (I,)),
        Strategy((I, I, I), (R,)),
        Strategy((R, S(0), S(0)), (S(1),)),
        Strategy((P, P, P), (P,)),
        Strategy((P, R, R), (P,)),
    ],
    ids=str,
)
def test_a_wrong_strategy_is_found(wrong: Strategy) -> None:
    assert faults(linear(), wrong, 2)


def test_a_linear_layer_splits_by_rows_columns_and_batch() -> None:
    assert [str(strategy) for strategy in strategies(linear().node, 2)] == [
        "I I I -> I",
        "R R R -> R",
        "S(0) R R -> S(0)",
        "S(1) R R -> S(1)",
        "S(2) S(1) P -> P",
        "R S(0) S(0) -> S(2)",
        "P R P -> P",
        "R P P -> P",
    ]


def test_a_size_that_does_not_divide_is_split_unevenly() -> None:
    call = example(aten.linear.default, real(1, 4), real(101, 4))
    columns = Strategy((R, S(0)), (S(1),))
    assert columns in split(call, 4)
    assert faults(call, columns, 4) == ()
    assert Strategy((R, S(0)), (S(1),)) not in strategies(
        example(aten.linear.default, real(1, 4), real(3, 4)).node, 4
    )


def test_heads_do_not_split_within() -> None:
    call = example(aten.view.default, real(2, 5, 12), [2, 5, 2, 6])
    assert str(split(call, 2)[4]) == "S(2) -> S(2), size[2] = 2 split"
    assert not any(s.inputs[0] == S(2) for s in split(call, 4))


def test_values_without_gradients_are_replicated_in_one_way() -> None:
    call = example(aten.add.Tensor, real(4, 4), real(4))
    table = call.operands[1].node.name
    names = {call.operands[0].node.name, call.node.name}
    assert table not in names
    found = strategies(call.node, 2, differentiable=names)
    assert [str(s) for s in found[:2]] == ["I R -> I", "R R -> R"]
    assert str(strategies(call.node, 2, differentiable=set())[0]) == "R R -> R"


def test_random_numbers_are_the_same_on_replicated_values_and_others_on_pieces() -> None:
    call = example(aten.dropout.default, real(4, 4), 0.5, True)
    draws = {str(s.outputs[0]): s.draws for s in split(call, 2)}
    assert draws == {"I": "same", "R": "same", "P": "same", "S(0)": "own", "S(1)": "own"}


def test_an_update_in_place_keeps_the_type_of_what_it_updates() -> None:
    call = example(aten.add_.Tensor, real(4, 4), real(4))
    assert all(s.inputs[0] == s.outputs[0] for s in split(call, 2))
    assert Strategy((S(1), S(0)), (S(1),)) in split(call, 2)


def test_fused_projections_split_within_their_segments() -> None:
    weight = example(aten.linear.default, real(2, 4), real(16, 4))
    whole = Strategy((R, S(0, (8, 4, 4))), (S(1, (8, 4, 4)),))
    assert whole in strategies(weight.node, 2, segments=[(8, 4, 4)])
    parts = example(aten.split_with_sizes.default, real(2, 16), [8, 4, 4], 1)
    found = [s for s in strategies(parts.node, 2, segments=[(8, 4, 4)]) if s.inputs[0].segments]
    assert [str(s).partition(",")[0] for s in found] == ["S(1: 8 4 4) -> S(1) S(1) S(1)"]
    assert faults(parts, found[0], 2) == ()
    assert not [s for s in strategies(parts.node, 8, segments=[(8, 4, 4)]) if s.inputs[0].segments]


def test_classes_split_when_ranks_exchange_the_maximum_and_the_sum_of_each_row() -> None:
    logits = torch.randn(6, 101, dtype=torch.float64, requires_grad=True)
    target = torch.randint(101, (6,))
    call = example(aten.cross_entropy_loss.default, logits, target)
    assert Strategy((S(1), R), (I,), special="classes") in split(call, 4)
    pieces = [take(logits.detach(), S(1), 4, rank) for rank in range(4)]
    largest = torch.stack([part.max(1).values for part in pieces]).max(0).values  # all-reduce
    total = torch.stack([(part - largest[:, None]).exp().sum(1) for part in pieces]).sum(0)  # too
    chosen = logits.detach()[torch.arange(6), target]
    loss = F.cross_entropy(logits, target)
    torch.testing.assert_close((largest + total.log() - chosen).mean(), loss.detach())
    (gradient,) = torch.autograd.grad(loss, logits)
    for rank, part in enumerate(pieces):
        own = piece(101, 4, rank)
        here = F.one_hot(target, 101)[:, own.start : own.start + own.size]
        local = ((part - largest[:, None]).exp() / total[:, None] - here) / 6
        torch.testing.assert_close(local, take(gradient, S(1), 4, rank))


def test_weighted_classes_are_not_split() -> None:
    call = example(aten.cross_entropy_loss.default, real(6, 8), torch.arange(6), real(8))
    assert not [s for s in split(call, 4) if s.special == "classes"]
