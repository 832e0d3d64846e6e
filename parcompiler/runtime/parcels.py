"""Small tensors travel together: a message takes longer than the copy of a megabyte.

    bias  norm  scale │ embedding │ bias  norm          a parcel is a row of bytes, in which
    └─── parcel ────┘ └─ parcel ─┘ └ parcel ┘          tensors follow one another

>>> parcels([10, 20, 5 * MOST, 30])
[range(0, 2), range(2, 3), range(3, 4)]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from parcompiler.runtime.axis import in_memory

MOST = 1 << 20  # bytes of tensors that travel together


def parcels(sizes: Sequence[int]) -> list[range]:
    """Ranges of neighbouring tensors that travel together: at most `MOST` bytes, or one tensor."""
    parcels_so_far, start, filled = [], 0, 0
    for k, size in enumerate(sizes):
        if k > start and filled + size > MOST:
            parcels_so_far.append(range(start, k))
            start, filled = k, 0
        filled += size
    return [*parcels_so_far, range(start, len(sizes))] if sizes else []


def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of tensors of one device; for a single tensor a view of it where possible."""
    rows = [in_memory(tensor.detach()).reshape(-1).view(torch.uint8) for tensor in tensors]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def unpacked(
    row: torch.Tensor, kinds: Sequence[tuple[Sequence[int], torch.dtype]]
) -> Iterator[torch.Tensor]:
    """The tensors of these shapes and dtypes that a row of bytes was packed from."""
    sizes = [nbytes(*kind) for kind in kinds]
    for part, (shape, dtype) in zip(row.split(sizes), kinds, strict=True):
        aligned = part if len(kinds) == 1 else part.clone()
        yield aligned.view(dtype).view(tuple(shape))


def nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return torch.Size(shape).numel() * dtype.itemsize
