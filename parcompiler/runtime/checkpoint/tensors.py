"""Safetensors files, written with their checksum and read by pieces, with torch alone.

The library of that name holds whole files in memory to write them, and hashing and syncing them
would read them again. complex128, which the format lacks, is stored as pairs of float64.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parcompiler.errors import InputError
from parcompiler.runtime.axis import in_memory
from parcompiler.runtime.checkpoint.boxes import Box
from parcompiler.runtime.files import DTYPES, PAIRS, parsed_header

NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 8  # bytes: of the header, so that tensors behind it are aligned


@dataclass(frozen=True, slots=True)
class Described:
    """What a file says of a tensor before it is written: `make` gives its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Described:
        """A tensor that is there."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def size(self) -> int:
        """Bytes."""
        return Box.whole(self.shape).count * self.dtype.itemsize


def write(path: Path, tensors: Mapping[str, Described], metadata: Mapping[str, str]) -> str:
    """Write a file, one tensor in memory at a time, until it is on the disk; its SHA-256.

    Raises OSError when it cannot be written.
    """
    # Wide elements first, so that all are aligned; by name, so that the bytes are always the same.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {}
    pairs = sorted(name for name in names if tensors[name].dtype == torch.complex128)
    if metadata or pairs:
        header["__metadata__"] = {**metadata, **({PAIRS: json.dumps(pairs)} if pairs else {})}
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
        for raw in _raw(text, [tensors[name] for name in names]):
            digest.update(raw)
            file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _raw(header: bytes, tensors: Sequence[Described]) -> Iterator[bytes | memoryview]:
    """The bytes of a file, one part after another."""
    yield len(header).to_bytes(8, "little") + header
    for item in tensors:
        tensor = in_memory(item.make().detach().cpu())
        if (tensor.dtype, tuple(tensor.shape)) != (item.dtype, item.shape):
            message = f"a tensor is {tensor.dtype} {tuple(tensor.shape)}, not as it was described"
            raise AssertionError(message)
        if tensor.numel():
            memory = (ctypes.c_char * item.size).from_address(tensor.data_ptr())
            yield memoryview(memory)


class File:
    """An open safetensors file. `count` are the bytes that were copied out of it.

    Raises InputError when it cannot be read, is no such file, or is cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                header, self._pairs = parsed_header(path, file.read(min(length, size)))
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
        """The tensors."""
        return list(self._entries)

    def dtype(self, name: str) -> torch.dtype:
        """The elements of a tensor."""
        return torch.complex128 if name in self._pairs else self._entries[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        shape = self._entries[name][1]
        return shape[:-1] if name in self._pairs else shape

    def read(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Copy a box of a tensor into `target`, which may have another dtype or device."""
        dtype, shape, begin, count = self._entries[name]
        if not box.count:
            return
        if begin % dtype.itemsize:
            raw = bytearray(self._map[begin : begin + count * dtype.itemsize])
            whole = torch.frombuffer(raw, dtype=dtype)
        else:
            whole = torch.frombuffer(self._map, dtype=dtype, count=count, offset=begin)
        whole = whole.view(shape)
        if name in self._pairs:
            whole = torch.view_as_complex(whole)
        target.copy_(box.of(whole))
        self.count += box.count * whole.element_size()

    def _checked(
        self, name: str, entry: Any, start: int, size: int
    ) -> tuple[torch.dtype, tuple[int, ...], int, int]:
        """Dtype, shape, place in the file and number of elements of a tensor, if they fit."""
        try:
            dtype, shape = DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
            begin, end = map(int, entry["data_offsets"])
            count = Box.whole(shape).count
        except (KeyError, TypeError, ValueError) as error:
            shown = json.dumps(entry)[:100]
            message = f"{self.path} has a damaged or unknown entry for {name!r}: {shown}"
            raise InputError(message) from error
        if min((0, *shape)) < 0 or not 0 <= begin <= end or end - begin != count * dtype.itemsize:
            message = f"{self.path} has a damaged entry for {name!r}: {json.dumps(entry)[:100]}"
            raise InputError(message)
        if start + end > size:
            message = f"{self.path} is cut short: it ends before {name!r} does"
            raise InputError(message)
        return dtype, shape, start + begin, count
