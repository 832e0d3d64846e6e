"""Reads safetensors files with torch alone, so that a cluster needs nothing else.

The format: 8 bytes, little endian, the length of a JSON header; the header names dtype, shape and
place of each tensor; then the raw data (https://huggingface.co/docs/safetensors). Nothing is
unpickled and nothing in the file is run. The format has no complex128: such a tensor is stored as
float64 [..., 2], its real and imaginary parts, and the metadata of the file says which they are.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from parcompiler.errors import InputError
from parcompiler.runtime.files import checksum, sums
from parcompiler.runtime.program import RankProgram

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
_PAIRS = "complex128"  # in the metadata: a JSON list of the names of pairs of float64


def storable(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, str] | None]:
    """Tensors that the format can hold, each with memory of its own, and the file's metadata."""
    pairs = sorted(name for name, tensor in tensors.items() if tensor.dtype == torch.complex128)
    copies = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    copies |= {name: torch.view_as_real(copies[name]) for name in pairs}
    return copies, {_PAIRS: json.dumps(pairs)} if pairs else None


def stored(folder: Path, program: RankProgram) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of what an exported folder holds for a rank: its stages, and its rows.

    Raises InputError when a file is missing, or not as it was exported.
    """
    exported = sums(folder)
    names = [f"stage_{index}" for index in program.stages]
    if program.rows:
        ranks = program.grid.plane(program.coordinate.data)
        names.append(f"vocabulary_{ranks.index(program.rank)}")
    for name in names:
        file = f"weights/{name}.safetensors"
        if file in exported:
            yield from _checked(folder / file, exported[file])


def _checked(path: Path, exported: str) -> Iterator[tuple[str, torch.Tensor]]:
    """What `read` yields, and InputError behind it unless the file has the checksum `exported`."""
    with ThreadPoolExecutor(1) as beside:  # hashing takes about as long as copying
        present = beside.submit(checksum, path)
        yield from read(path)
        if present.result() != exported:
            message = f"{path} is not as it was exported: copy or export the folder again"
            raise InputError(message)


def read(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in a file, one after another; tensors are copies.

    Raises InputError when the file cannot be read, is no safetensors file or is cut short.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        message = f"cannot read {path} ({error.strerror})"
        raise InputError(message) from error
    with file:
        length = int.from_bytes(file.read(8), "little")
        header, pairs = _header(path, file.read(min(length, path.stat().st_size)))
        if not header:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for name, entry in header.items():
                yield name, _tensor(path, name, entry, data, 8 + length, pair=name in pairs)


def _header(path: Path, raw: bytes) -> tuple[dict[str, Any], set[str]]:
    """The entries of the header, without its metadata, and the names of complex128 tensors."""
    try:
        header = json.loads(raw)
        metadata = header.pop("__metadata__", {})
        return header, set(json.loads(metadata.get(_PAIRS, "[]")))
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        message = f"{path} is no safetensors file, or cut short"
        raise InputError(message) from error


def _tensor(
    path: Path, name: str, entry: dict[str, Any], data: mmap.mmap, start: int, *, pair: bool
) -> torch.Tensor:
    """One tensor, copied out of the file."""
    try:
        begin, end = entry["data_offsets"]
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        if not 0 <= begin <= end:
            raise ValueError(begin, end)
        raw = bytearray(data[start + begin : start + end])
        if len(raw) != end - begin:
            message = f"{path} is cut short: it ends within {name!r}"
            raise InputError(message)
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        tensor = flat.reshape(shape)
        return torch.view_as_complex(tensor) if pair else tensor
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        message = f"{path} has a damaged or unknown entry for {name!r}: {json.dumps(entry)[:100]}"
        raise InputError(message) from error
