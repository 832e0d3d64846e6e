"""Random numbers: the same under any schedule, and not those of the user's generator."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from parcompiler.runtime.rng import SeededDraws, mixed, seeded

CPU = torch.device("cpu")


def test_different_numbers_give_different_seeds() -> None:
    seeds = {
        mixed(s, t, j, i) for s in range(4) for t in range(6) for j in range(6) for i in range(6)
    }
    assert len(seeds) == 4 * 6 * 6 * 6
    assert mixed(1, 2) != mixed(2, 1)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeded_draws_do_not_depend_on_what_was_drawn_before() -> None:
    with seeded(7, CPU):
        first = torch.rand(3)
    torch.rand(5)
    with seeded(7, CPU):
        assert torch.equal(torch.rand(3), first)
    with seeded(8, CPU):
        assert not torch.equal(torch.rand(3), first)


@pytest.mark.parametrize("around", [lambda: seeded(7, CPU), lambda: SeededDraws(7, 0)])
def test_the_users_generator_is_left_alone(around: Callable[[], Any]) -> None:
    before = torch.get_rng_state()
    with around():
        F.dropout(torch.ones(9), 0.5)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ZeroDivisionError), around():
        F.dropout(torch.ones(9), 0.5)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_of_cuda_is_that_of_the_cpu() -> None:
    x = torch.randn(50, requires_grad=True)
    with SeededDraws(3, 1) as drawn:
        wanted = F.dropout(x, 0.4)
    with SeededDraws(3, 1) as own:
        found, kept = torch.ops.aten.native_dropout(x, 0.4, True)
        same, _ = torch.ops.aten.native_dropout(x, 0.4, False)
    assert torch.equal(found, wanted)
    assert torch.equal(kept, wanted != 0)
    assert torch.equal(same, x)
    assert own.counts == drawn.counts
    gradients = (torch.autograd.grad(y.sum(), x)[0] for y in (found, wanted))
    torch.testing.assert_close(*gradients)


def test_each_draw_of_a_proof_has_its_number_among_those_of_its_operator() -> None:
    x = torch.ones(50)
    with SeededDraws(3, 1) as drawn:
        whole = [F.dropout(x, 0.5), torch.rand(4), F.dropout(x, 0.5)]
    dropout, rand = drawn.counts
    assert drawn.counts == {dropout: 2, rand: 1}
    with SeededDraws(3, 1, {dropout: [1]}):
        last = F.dropout(x, 0.5)
    with SeededDraws(3, 1, {dropout: [0], rand: [0]}):
        inner = torch.rand(4)
        first = F.dropout(x, 0.5)
    assert torch.equal(last, whole[2])
    assert torch.equal(inner, whole[1])
    assert torch.equal(first, whole[0])
    assert not torch.equal(whole[0], whole[2])
    with SeededDraws(3, 2):
        assert not torch.equal(F.dropout(x, 0.5), whole[0])


def test_an_operator_that_draws_nothing_is_not_counted() -> None:
    x = torch.ones(1, 2, 4, 8)
    with SeededDraws(3, 1) as drawn:
        F.scaled_dot_product_attention(x, x, x)
    assert not +drawn.counts
