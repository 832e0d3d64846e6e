"""Safetensors files, written with their checksum and read by pieces, with torch alone.

A file begins with 8 bytes, little endian, the length of a JSON header; the header names dtype,
shape and place of each tensor; then comes the raw data (https://huggingface.co/docs/safetensors).
Nothing is unpickled and nothing in the file is run. The format has no complex128: such a tensor is
stored as float64 [..., 2], its real and imaginary parts, and the metadata says which they are.

The safetensors library needs more than torch, holds whole files in memory to write them, and would
have them read again for hashing.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parcompiler.errors import InputError, check_no_pipe
from parcompiler.runtime.axis import in_memory, raw
from parcompiler.runtime.boxes import Box

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PAIRS = "complex128"  # in the metadata: a JSON list of the names of pairs of float64
ALIGNMENT = 8  # bytes: of the header, so that tensors behind it are aligned


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor to be written: dtype and shape for the header, and `make`, which returns its
    values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Described:
        """The description of an existing tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def size(self) -> int:
        """Bytes."""
        return Box.whole(self.shape).count * self.dtype.itemsize


def write(
    path: Path,
    named: Mapping[str, torch.Tensor | Described],
    metadata: Mapping[str, str] | None = None,
    *,
    durable: bool = False,
) -> str:
    """Write a file, one tensor in memory at a time. Returns its SHA-256. `durable`: wait until it
    is on the disk.

    Raises OSError when it cannot be written, InputError for a dtype that the format lacks.
    """
    tensors = {n: x if isinstance(x, Described) else Described.of(x) for n, x in named.items()}
    # Wide elements first, so that all are aligned; by name, so that the bytes are always the same.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {}
    pairs = sorted(name for name in names if tensors[name].dtype == torch.complex128)
    facts = {**(metadata or {}), **({PAIRS: json.dumps(pairs)} if pairs else {})}
    if facts:
        header["__metadata__"] = facts
    begin = 0
    for name in names:
        item = tensors[name]
        shape, dtype = list(item.shape), item.dtype
        if dtype == torch.complex128:
            shape, dtype = [*shape, 2], torch.float64
        if dtype not in NAMES:
            message = f"{name!r} is of {dtype}, which safetensors files cannot hold"
            raise InputError(message)
        end = begin + item.size
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for part in _parts(text, [tensors[name] for name in names]):
            digest.update(part)
            file.write(part)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    return digest.hexdigest()


def _parts(header: bytes, tensors: Sequence[Described]) -> Iterator[bytes | memoryview]:
    """The bytes of a file, one part after another."""
    yield len(header).to_bytes(8, "little") + header
    for item in tensors:
        tensor = in_memory(item.make().detach().cpu())
        if (tensor.dtype, tuple(tensor.shape)) != (item.dtype, item.shape):
            message = f"a tensor is {tensor.dtype} {tuple(tensor.shape)}, not as it was described"
            raise AssertionError(message)
        yield raw(tensor)


class File:
    """An open safetensors file.

    Raises InputError when it cannot be read, is no such file, or is cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_no_pipe(path)
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                header, self._pairs = _parsed(path, file.read(min(length, size)))
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            message = f"cannot read {path} ({getattr(error, 'strerror', None) or error})"
            raise InputError(message) from error
        self._entries = {
            name: self._checked(name, entry, 8 + length, size) for name, entry in header.items()
        }

    def names(self) -> Sequence[str]:
        """The names of the tensors."""
        return list(self._entries)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return torch.complex128 if name in self._pairs else self._entries[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        shape = self._entries[name][1]
        return shape[:-1] if name in self._pairs else shape

    def whole(self, name: str) -> torch.Tensor:
        """A copy of a tensor."""
        target = torch.empty(self.shape(name), dtype=self.dtype(name))
        self.read(name, Box.whole(target.shape), target)
        return target

    def read(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Copy a box of a tensor into `target`, which may have another dtype or device."""
        dtype, shape, begin, count = self._entries[name]
        if not box.count:
            return
        # Pairs of 8-byte numbers are read as 16-byte ones; kernels crash where those are not
        # aligned.
        if begin % self.dtype(name).itemsize:
            data = bytearray(self._map[begin : begin + count * dtype.itemsize])
            whole = torch.frombuffer(data, dtype=dtype)
        else:
            whole = torch.frombuffer(self._map, dtype=dtype, count=count, offset=begin)
        whole = whole.view(shape)
        if name in self._pairs:
            whole = torch.view_as_complex(whole)
        target.copy_(box.of(whole))

    def _checked(
        self, name: str, entry: Any, start: int, size: int
    ) -> tuple[torch.dtype, tuple[int, ...], int, int]:
        """Dtype, shape, place in the file and number of elements of a tensor, if they fit."""
        try:
            dtype, shape = DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
            begin, end = map(int, entry["data_offsets"])
            count = Box.whole(shape).count
            fits = min((0, *shape)) >= 0 <= begin and end - begin == count * dtype.itemsize
            if name in self._pairs:
                fits = fits and dtype == torch.float64 and shape[-1:] == (2,)
            if not fits:
                raise ValueError(shape, begin, end)
        except (KeyError, TypeError, ValueError) as error:
            shown = json.dumps(entry)[:100]
            message = f"{self.path} has a damaged or unknown entry for {name!r}: {shown}"
            raise InputError(message) from error
        if start + end > size:
            message = f"{self.path} is cut short: it ends before {name!r} does"
            raise InputError(message)
        return dtype, shape, start + begin, count


def read(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in a file, one after another; tensors are copies.

    Raises InputError as `File` does.
    """
    file = File(path)
    for name in file.names():
        yield name, file.whole(name)


def _parsed(path: Path, text: bytes) -> tuple[dict[str, Any], set[str]]:
    """The entries of the header, without its metadata, and the names of complex128 tensors."""
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        return header, set(json.loads(metadata.get(PAIRS, "[]")))
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        message = f"{path} is no safetensors file, or cut short"
        raise InputError(message) from error
