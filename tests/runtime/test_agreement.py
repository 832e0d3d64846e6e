"""Digests of weights: equal where the bytes are, and others where one element is another."""

import pytest
import torch

from parcompiler.runtime import agreement

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.bool,
    torch.int64, torch.uint8, torch.complex64, torch.complex128,
)  # fmt: skip


def digest(*tensors: torch.Tensor) -> int:
    return agreement.digest_of(tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3, 4)])
def test_one_element_makes_another_digest(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.arange(12).reshape(3, 4) % 2 if shape else torch.tensor(1)
    tensor = values.to(dtype)
    assert digest(tensor) == digest(tensor.clone())
    others = [tensor.clone() for _ in range(tensor.numel())]
    for index, other in enumerate(others):
        other.view(-1)[index] = 1 - int(values.reshape(-1)[index])
    assert len({digest(t) for t in (tensor, *others)}) == len(others) + 1


def test_a_digest_is_of_the_values_in_their_order_whatever_the_memory() -> None:
    tensor = torch.randn(4, 6, dtype=torch.complex64)
    strided = torch.zeros(8, 6, dtype=torch.complex64)[::2].copy_(tensor)
    assert digest(tensor) == digest(strided) == digest(tensor.conj().clone().conj())
    assert digest(tensor) == digest(tensor.t().contiguous().t())
    assert digest(tensor) != digest(tensor.flip(0))
    values = torch.arange(9.0)
    assert digest(values[1:]) == digest(values[1:].clone())  # not at a multiple of 8 bytes
    assert digest(torch.zeros(0)) == digest(torch.zeros(0, 3))
    assert digest(tensor, strided) != digest(strided)  # a parameter and its master


def test_long_tensors_count_each_element() -> None:
    tensor = torch.zeros(37)
    found = {digest(tensor)}
    for index in range(37):
        tensor.zero_()[index] = 1
        found.add(digest(tensor))
    assert len(found) == 38
