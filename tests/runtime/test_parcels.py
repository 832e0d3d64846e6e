"""Tensors that travelled together are those that were packed, and large ones travel alone."""

import pytest
import torch

from parcompiler.runtime.parcels import MOST, nbytes, packed, parcels, unpacked

TENSORS = [
    torch.arange(3, dtype=torch.int16),
    torch.tensor(True),
    torch.randn(2, 3, dtype=torch.float64).T,
    torch.randn(4).bfloat16(),
    torch.randn(0, 5),
    torch.randn(3, dtype=torch.complex64).conj(),
    torch.randn(2, 4)[:, ::2],
    torch.randn(2, 2, requires_grad=True),
]


def kinds(tensors: list[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def test_what_is_unpacked_is_what_was_packed() -> None:
    row = packed(TENSORS)
    assert row.dtype == torch.uint8
    assert row.numel() == sum(nbytes(*kind) for kind in kinds(TENSORS))
    for found, tensor in zip(unpacked(row, kinds(TENSORS)), TENSORS, strict=True):
        assert found.dtype == tensor.dtype
        assert not found.requires_grad
        assert torch.equal(found, tensor)


@pytest.mark.parametrize("tensor", TENSORS)
def test_a_tensor_alone_is_not_copied_where_its_memory_is_in_order(tensor: torch.Tensor) -> None:
    row = packed([tensor])
    (found,) = unpacked(row, kinds([tensor]))
    assert torch.equal(found, tensor)
    if tensor.numel() and tensor.is_contiguous() and not tensor.is_conj():
        assert found.data_ptr() == tensor.data_ptr()


def test_parcels_are_as_few_as_their_size_allows() -> None:
    assert parcels([]) == []
    assert parcels([0]) == [range(0, 1)]
    assert parcels([MOST // 2, MOST // 2, 1]) == [range(0, 2), range(2, 3)]
    assert parcels([MOST + 1, 0, 1]) == [range(0, 1), range(1, 3)]
    assert parcels([1, MOST + 1, 1]) == [range(0, 1), range(1, 2), range(2, 3)]
