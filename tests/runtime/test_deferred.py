"""Linear layers that leave their weight gradients for later compute the same bits."""

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parcompiler.cost.live_memory import SavedTensors
from parcompiler.runtime.axis import Axis, within
from parcompiler.runtime.deferred import Deferral, addmm, finish, linear
from parcompiler.runtime.tensor import fan_out


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
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
        expected.cos().sum().abs().backward()
        with deferral.collect() as products:
            result.cos().sum().abs().backward()
        assert len(products) == 1
        finish(products)
    same_gradients(split, plain)


def test_nothing_is_left_without_a_collection() -> None:
    x, weight = tensors((3,), bias=False, dtype=torch.float64)
    deferral = Deferral()
    with deferral.forward():
        linear(x, weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("is_addmm", [False, True])
def test_a_product_keeps_no_leaf_of_the_stage_alive(is_addmm: bool) -> None:
    x, weight, bias = tensors((3,), bias=True, dtype=torch.float64)
    deferral = Deferral()
    with deferral.forward():
        h = x.sin()
        result = addmm(bias, h, weight.t()) if is_addmm else linear(h, weight, bias)
    with deferral.collect() as products:
        result.sum().backward()
    assert x.grad is not None
    leaf, gradient = weakref.ref(x), weakref.ref(x.grad)
    del x, h, result
    assert (leaf(), gradient()) == (None, None)
    assert len(products) == 1


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


def test_a_layer_without_inputs_has_a_gradient_of_its_bias() -> None:
    x, weight, bias = (torch.ones(shape, requires_grad=True) for shape in ((4, 0), (3, 0), (3,)))
    deferral = Deferral()
    with deferral.forward():
        result = linear(x, weight, bias)
    with deferral.collect() as products:
        result.sum().backward()
    finish(products)
    assert weight.grad is not None
    assert bias.grad is not None
    assert weight.grad.shape == (3, 0)
    assert torch.equal(bias.grad, torch.full((3,), 4.0))


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


def test_a_weight_with_several_products_adds_them_up_first() -> None:
    """As autograd does, so that what is added to older gradients has the same bits."""
    torch.manual_seed(0)
    x = torch.randn(3, 8)
    plain, split = (torch.randn(8, 8).requires_grad_() for _ in range(2))
    split.data.copy_(plain.data)
    deferral = Deferral()
    for _ in range(3):
        F.linear(F.linear(F.linear(x, plain).cos(), plain).cos(), plain).cos().sum().backward()
        with deferral.forward():
            result = linear(linear(linear(x, split).cos(), split).cos(), split).cos().sum()
        with deferral.collect() as products:
            result.backward()
        assert len(products) == 3
        finish(products)
        assert not products
    same_gradients([split], [plain])


def test_only_inputs_and_gradients_of_products_outlive_the_first_half() -> None:
    x, weight = torch.randn(4, 8), torch.randn(8, 8).requires_grad_()
    deferral = Deferral()
    saved = SavedTensors()
    with saved, deferral.forward():
        result = F.gelu(linear(F.gelu(linear(x, weight)), weight)).sum()
    assert len(saved.storages()) > 3
    with deferral.collect() as products:
        result.backward()
    del result
    assert not saved.storages()
    cells = [cell.cell_contents for p in products for cell in p.compute.__closure__ or ()]
    assert sum(cell.untyped_storage().nbytes() for cell in cells) == 4 * x.nbytes
    del cells


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 3, 4)])
def test_a_result_can_be_changed_in_place(shape: tuple[int, ...], bias: bool) -> None:
    plain, split = (tensors(shape, bias=bias, dtype=torch.float64) for _ in range(2))
    deferral = Deferral()
    F.linear(*plain).relu_().sum().backward()
    with deferral.forward():
        result = linear(*split).relu_().sum()
    with deferral.collect() as products:
        result.backward()
    finish(products)
    same_gradients(split, plain)


def test_a_whole_backward_has_its_products_beside_a_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sum over the ranks is started, then the products that were left are computed, then it is
    waited for; what comes behind the last collective is computed at the end."""
    events: list[str] = []

    class Work:
        def wait(self) -> None:
            events.append("wait")

    def all_reduce(*_: object, **options: object) -> Work:
        assert options["async_op"]
        events.append("start")
        return Work()

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    torch.manual_seed(0)
    first, second, third = (nn.Linear(4, 4) for _ in range(3))
    x = torch.randn(2, 4)

    def run(apply: Callable[[nn.Linear, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        y = fan_out(apply(first, x)).tanh()
        return apply(third, apply(second, y)).sum()

    axis = Axis(0, 1, None, torch.device("cpu"))
    deferral = Deferral()
    layers = {first: "first", second: "second", third: "third"}
    names = {layer.weight: name for layer, name in layers.items()}
    with within(axis):
        run(lambda layer, x: layer(x)).backward()
        wanted = [layer.weight.grad for layer in layers]
        for layer in layers:
            layer.zero_grad(set_to_none=True)
        with deferral.forward():
            loss = run(lambda layer, x: linear(x, layer.weight, layer.bias))
        events.clear()
        leaving = deferral.beside(lambda weight: events.append(names[weight]))
        with leaving as compute, axis.expecting(False, compute):
            loss.backward()
    assert events == ["start", "third", "second", "wait", "first"]
    for layer, gradient in zip(layers, wanted, strict=True):
        assert gradient is not None
        torch.testing.assert_close(layer.weight.grad, gradient, rtol=0, atol=0)
