"""The passes of a spread vocabulary against F.cross_entropy and F.embedding on the whole."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from parcompiler import runtime
from parcompiler.errors import InputError
from parcompiler.pieces import own_rows
from parcompiler.runtime import lookup
from parcompiler.runtime.softmax import Softmax
from tests.runtime.spreading import Case, Step, difference, eager, spread

METHODS = ("naive", "vocab-1", "vocab-2")
BOUND = 1e-12


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"cap": 2.0},
        {"smoothing": 0.1},
        {"weighted": True},
        {"smoothing": 0.2, "weighted": True, "cap": 1.5},
        {"ignored": (0, 1, 2, 3, 4, 5)},
        {"classes": 2},
        {"classes": 64, "rows": 1, "ignored": ()},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_loss_and_gradients_are_those_of_the_whole(
    method: str, ranks: int, options: dict[str, Any]
) -> None:
    case = Case(**options)
    assert difference(spread(case, method, ranks), eager(case)) <= BOUND


@settings(max_examples=60)
@given(
    method=st.sampled_from(METHODS),
    ranks=st.integers(1, 5),
    case=st.builds(
        Case,
        classes=st.integers(2, 40),  # with one the gradient is a rounding of nothing
        rows=st.just(6),
        width=st.integers(1, 4),
        cap=st.sampled_from([0.0, 0.7]),
        smoothing=st.sampled_from([0.0, 0.3]),
        weighted=st.booleans(),
        reduction=st.sampled_from(["mean", "sum"]),
        ignored=st.sampled_from([(), (0,), (1, 4)]),
        seed=st.integers(0, 1000),
    ),
)
def test_any_head_is_that_of_the_whole(method: str, ranks: int, case: Case) -> None:
    assert difference(spread(case, method, ranks), eager(case)) <= BOUND


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("method", METHODS)
def test_without_labels_that_count_it_is_what_eager_gives(
    method: str, reduction: str, smoothing: float
) -> None:
    case = Case(ignored=tuple(range(7)), reduction=reduction, smoothing=smoothing)
    wanted = eager(case)
    assert wanted.loss.isnan() == (reduction == "mean")
    assert difference(spread(case, method, 2), wanted) == 0.0


@pytest.mark.parametrize("method", METHODS)
def test_logits_far_apart_neither_overflow_nor_vanish(method: str) -> None:
    bias = torch.linspace(-300, 300, 13)
    for shifted in (bias, bias.flip(0), 1000 + bias):
        case = Case(dtype=torch.float32, given=(("bias", shifted),))
        assert difference(spread(case, method, 3), eager(case)) <= 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_sixteen_bits_stay_as_close_as_those_of_eager(method: str) -> None:
    case = Case(classes=500, rows=32, width=16, dtype=torch.bfloat16, scale=1.0)
    drawn = tuple((name, t) for name, t in case.tensors().items() if t.is_floating_point())
    exact = eager(replace(case, dtype=torch.float32, given=drawn))
    wanted, found = eager(case), spread(case, method, 2)
    for name in Step._fields:
        true = getattr(exact, name)
        theirs, ours = (
            (getattr(step, name).float() - true).norm() / true.norm() for step in (wanted, found)
        )
        assert ours <= 1.2 * theirs + 1e-3, name


@pytest.mark.parametrize("method", METHODS)
def test_the_gradient_of_a_label_that_is_nearly_sure_is_not_rounded_away(method: str) -> None:
    weight = torch.zeros(6, 4)
    weight[0] = 2.0  # logit 8 against 0: P is 0.998, and 1 in sixteen bits
    given = (("x", torch.ones(1, 4)), ("weight", weight), ("bias", torch.zeros(6)))
    case = Case(classes=6, rows=1, width=4, ignored=(), dtype=torch.bfloat16, given=given)
    label = next(seed for seed in range(99) if not replace(case, seed=seed).tensors()["labels"])
    case = replace(case, seed=label)
    true = eager(replace(case, dtype=torch.float64))
    assert difference(spread(case, method, 2), true) <= 0.02


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("size", [3, 13, 16])
def test_rows_that_ranks_look_up_add_up_to_the_embedding(size: int, ranks: int) -> None:
    torch.manual_seed(0)
    words, gradient = torch.randint(size, (2, 5)), torch.randn(2, 5, 4)
    whole = torch.randn(size, 4).requires_grad_()
    wanted = F.embedding(words, whole, padding_idx=1)
    wanted.backward(gradient)
    assert whole.grad is not None
    tables, total = [], torch.zeros(2, 5, 4)
    for rank in range(ranks):
        own = own_rows(size, ranks, rank)
        table = nn.Parameter(runtime.rows(size, 4, ranks=ranks))
        table.data[: own.size] = whole[own.start : own.start + own.size].detach()
        total += lookup.embed(table, words, own)
        for half in (gradient, gradient):  # two micro-batches
            lookup.embed_backward(table, words, own, half / 2, padding=1)
        tables.append(table)
    assert torch.equal(total, wanted.detach())
    gradients = torch.cat([table.grad for table in tables if table.grad is not None])
    assert torch.allclose(gradients[:size], whole.grad, rtol=1e-6, atol=1e-6)
    assert not gradients[size:].any()


def test_a_frozen_table_gets_no_gradient() -> None:
    table = nn.Parameter(torch.zeros(4, 2), requires_grad=False)
    lookup.embed_backward(table, torch.tensor([1]), own_rows(4, 1, 0), torch.ones(1, 2))
    assert table.grad is None


@pytest.mark.parametrize("word", [-1, 13, 2**40])
def test_a_word_that_is_in_no_table_is_refused(word: int) -> None:
    words = torch.tensor([0, 12, word])
    with pytest.raises(InputError, match=rf"the words must be from 0 to 12 \({word} given\)"):
        lookup.check(words, 13, "the words")
    with pytest.raises(InputError, match=rf"0 to 12 or -100, which is ignored \({word} given\)"):
        lookup.check(words, 13, "the labels", -100)
    lookup.check(words, 13, "the labels", word)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's compiler's
@pytest.mark.parametrize("method", ["vocab-1", "vocab-2"])
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_few_compiled_kernels_compute_the_same(method: str, cap: float) -> None:
    case = Case(cap=cap, dtype=torch.float32)
    assert difference(spread(case, method, 2, fused=True), eager(case)) <= 1e-5


def test_a_failure_of_the_compiler_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object) -> object:
        message = "no compiler"
        raise OSError(message)

    monkeypatch.setattr(torch, "compile", lambda *_, **__: failing)
    products = torch.randn(3, 8)
    function = torch.tanh
    found = Softmax(6, function, fused=True).of_block(products.clone(), torch.tensor([0, 1, 2]))
    wanted = Softmax(6, function).of_block(products.clone(), torch.tensor([0, 1, 2]))
    assert "not fused: no compiler" in caplog.text
    assert torch.allclose(found.powers, wanted.powers)
    assert torch.allclose(found.total, wanted.total)
