"""What is remembered of operators on tensors without data is what torch says, and no operand."""

from typing import Any

import pytest
import torch
from torch import nn

from parcompiler.cost import known_results
from parcompiler.cost.known_results import result
from tests.cost.blocks import GptLayer, ResidualBlock
from tests.cost.capture import capture

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def forms(found: Any) -> list[Any]:
    items = found if isinstance(found, list | tuple) else [found]
    return [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in items]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    nothing: dict[Any, Any] = {}
    monkeypatch.setattr(known_results, "_known", nothing)
    return nothing


@pytest.mark.parametrize(
    ("layer", "shape"), [(GptLayer(32, 4), (2, 8, 32)), (ResidualBlock(8), (2, 8, 6, 6))]
)
def test_every_operator_of_a_layer_has_the_result_that_torch_finds(
    layer: nn.Module,
    shape: tuple[int, ...],
    known: dict[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured = capture(layer, torch.randn(shape, requires_grad=True))
    costs, remembered = [captured.cost(split=True)], len(known)
    assert remembered > 5
    compared = 0

    def compare(func: Any, args: Any, kwargs: Any) -> Any:
        nonlocal compared
        found = result(func, args, kwargs)
        if not func._schema.is_mutable:
            assert forms(found) == forms(func(*args, **kwargs)), func
            compared += 1
        return found

    monkeypatch.setattr("parcompiler.cost.stand_in.result", compare)
    costs.append(captured.cost(split=True))
    assert compared > remembered == len(known)
    assert costs[0] == costs[1]


def test_a_number_a_dtype_and_the_order_in_memory_make_another_result() -> None:
    x, whole = meta(2, 3), meta(2, 3, dtype=torch.int64)
    numbers: list[Any] = [1, 1.0, True]
    for operand in numbers:
        assert forms(result(aten.add.Tensor, (whole, operand), {})) == forms(
            aten.add.Tensor(whole, operand)
        )
    assert result(aten.add.Tensor, (whole, 1.0), {}).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert result(aten.add.Tensor, (whole, 1.0), {}).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert result(aten.exp.default, (x,), {}).stride() == (3, 1)
    assert result(aten.exp.default, (meta(3, 2).T,), {}).stride() == (1, 2)
    assert result(aten.sum.dim_IntList, (x, [1]), {"dtype": torch.float64}).dtype == torch.float64
    assert result(aten.sum.dim_IntList, (x, [1]), {}).dtype == torch.float32


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (aten.view.default, ([6],)),
        (aten.add_.Tensor, (1.0,)),
        (aten.dropout.default, (0.1, False)),  # an operand, which its schema does not say
        (aten.unsafe_split.Tensor, (1,)),  # nor this that results share memory
    ],
)
def test_operands_and_their_memory_are_never_remembered(
    operator: Any, arguments: tuple[Any, ...], known: dict[Any, Any]
) -> None:
    for _ in range(2):
        x = meta(2, 3)
        found = result(operator, (x, *arguments), {})
        first = found if isinstance(found, torch.Tensor) else found[0]
        assert first.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert not known


def test_each_result_has_memory_of_its_own() -> None:
    x = meta(2, 3)
    for operator, arguments in ((aten.exp.default, ()), (aten.native_layer_norm.default, ([3],))):
        more: tuple[Any, ...] = (None, None, 1e-5) if arguments else ()
        found = [result(operator, (x, *arguments, *more), {}) for _ in range(2)]
        tensors = [t for one in found for t in (one if isinstance(one, tuple) else [one])]
        assert forms(found[0]) == forms(found[1])
        assert len({t.untyped_storage()._cdata for t in tensors}) == len(tensors)


def test_what_fails_fails_again_and_few_results_are_kept(
    known: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError):
            result(aten.mm.default, (meta(2, 3), meta(2, 3)), {})
    monkeypatch.setattr(known_results, "MOST", 3)
    for n in range(1, 8):
        result(aten.exp.default, (meta(n),), {})
        assert len(known) <= 3
