"""Linear layers that leave their weight gradients for later compute the same bits."""

import pytest
import torch
import torch.nn.functional as F

from parcompiler.runtime.deferred import Deferral, addmm, finish, linear


def tensors(shape: tuple[int, ...], *, bias: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(*shape, 8, dtype=dtype), torch.randn(5, 8, dtype=dtype)]
    made += [torch.randn(5, dtype=dtype)] if bias else []
    return [item.requires_grad_() for item in made]


def same_gradients(split: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    for ours, theirs in zip(split, plain, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 3, 4)])
def test_both_halves_give_the_bits_of_one_backward(
    shape: tuple[int, ...], bias: bool, dtype: torch.dtype
) -> None:
    plain, split = (tensors(shape, bias=bias, dtype=dtype) for _ in range(2))
    deferral = Deferral()
    for _ in range(2):  # gradients add up over micro-batches
        expected = F.linear(*plain)
        with deferral.forward():
            result = linear(*split)
        assert torch.equal(result, expected)
        expected.cos().sum().backward()
        with deferral.collect() as products:
            result.cos().sum().backward()
        assert len(products) == 1
        finish(products)
    same_gradients(split, plain)


def test_nothing_is_left_without_a_collection() -> None:
    x, weight = tensors((3,), bias=False, dtype=torch.float64)
    deferral = Deferral()
    with deferral.forward():
        linear(x, weight).sum().backward()
    assert weight.grad is not None


def test_a_frozen_weight_leaves_nothing() -> None:
    x, weight = tensors((3,), bias=False, dtype=torch.float64)
    weight.requires_grad_(False)
    deferral = Deferral()
    with deferral.forward():
        result = linear(x, weight)
    with deferral.collect() as products:
        result.sum().backward()
    assert not products
    assert x.grad is not None


def test_a_product_with_a_bias_first_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    shapes = ((5,), (6, 8), (8, 5))
    plain, split = ([torch.randn(shape).requires_grad_() for shape in shapes] for _ in range(2))
    for ours, theirs in zip(split, plain, strict=True):
        ours.data.copy_(theirs.data)
    deferral = Deferral()
    torch.addmm(*plain).cos().sum().backward()
    with deferral.forward():
        result = addmm(*split)
    with deferral.collect() as products:
        result.cos().sum().backward()
    finish(products)
    same_gradients(split, plain)
