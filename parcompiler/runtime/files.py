"""The files of an exported folder: their checksums, and weights, which torch alone can read.

    sha256sum --check SHA256SUMS        says which files are not as they were exported

Ranks that start compare the checksums of all scripts and weights. A script may be edited, if it is
in the folders of all ranks; weights are as they were exported.

A safetensors file begins with 8 bytes, little endian, the length of a JSON header; the header names
dtype, shape and place of each tensor; then comes the raw data
(https://huggingface.co/docs/safetensors). Nothing is unpickled and nothing in the file is run. The
format has no complex128: such a tensor is stored as float64 [..., 2], its real and imaginary parts,
and the metadata of the file says which they are.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from parcompiler.errors import InputError, ParcompilerError
from parcompiler.runtime.program import RankProgram

REQUEST = "request.json"  # what was asked of the compiler
SUMS = "SHA256SUMS"  # what makes a folder an export
_COMPARED = (".py", ".safetensors")  # what ranks run and load
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
PAIRS = "complex128"  # in the metadata: a JSON list of the names of pairs of float64


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What ranks compare: `digest` of scripts as they are and of weights as they were exported.

    `edited` are the scripts that are not as they were exported.
    """

    digest: str
    edited: tuple[str, ...] = ()


def checksum(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal. Raises InputError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        message = f"cannot read {path} ({error.strerror}): copy or export the folder again"
        raise InputError(message) from error


def listing(folder: Path) -> str:
    """The text of SHA256SUMS for all files in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return "".join(f"{checksum(path)}  {path.relative_to(folder).as_posix()}\n" for path in files)


def sums(folder: Path) -> dict[str, str]:
    """The checksums of an exported folder's files by name. Raises InputError where they are not."""
    path = folder / SUMS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        listed = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except OSError as error:
        message = f"cannot read {path} ({error.strerror}): copy or export the folder again"
        raise InputError(message) from error
    except ValueError as error:
        message = f"{path} is damaged: remove the folder, and copy or export it again"
        raise InputError(message) from error
    if any(PurePosixPath(name).is_absolute() or ".." in name.split("/") for name in listed):
        message = f"{path} lists files outside of its folder: remove that, and export again"
        raise InputError(message)
    return listed


def request_of(folder: Path) -> dict[str, Any]:
    """What was asked of the compiler, as an export says it. Raises InputError where it is no JSON;
    empty where there is none."""
    path = folder / REQUEST
    try:
        found = json.loads(path.read_bytes()) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        message = f"cannot read {path} ({error}): copy or export the folder again"
        raise InputError(message) from error
    return found if isinstance(found, dict) else {}


def fingerprint(folder: Path) -> Fingerprint:
    """What the ranks that start from copies of a folder compare.

    Raises InputError when a script is missing.
    """
    exported = {n: digest for n, digest in sums(folder).items() if n.endswith(_COMPARED)}
    present = {n: checksum(folder / n) for n in exported if n.endswith(".py")}
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted((exported | present).items()))
    edited = tuple(sorted(name for name in present if present[name] != exported[name]))
    return Fingerprint(hashlib.sha256(text.encode()).hexdigest()[:15], edited)


@contextmanager
def loading(script: Path) -> Iterator[None]:
    """Around running a script of an exported folder as a module.

    Raises InputError for whatever ends it, and says which scripts are not as they were exported.
    """
    try:
        yield
    except ParcompilerError:
        raise
    except Exception as error:
        edited = ", ".join(fingerprint(script.parent).edited)
        reason = f"{type(error).__name__}: {error}"
        hint = f"; edited since the export: {edited}" if edited else ""
        message = f"cannot load {script} ({reason}{hint}): copy or export the folder again"
        raise InputError(message) from error


def storable(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, str] | None]:
    """Tensors that the format can hold, each with memory of its own, and the file's metadata."""
    pairs = sorted(name for name, tensor in tensors.items() if tensor.dtype == torch.complex128)
    copies = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    copies |= {name: torch.view_as_real(copies[name]) for name in pairs}
    return copies, {PAIRS: json.dumps(pairs)} if pairs else None


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
        path = folder / f"weights/{name}.safetensors"
        wanted = exported.get(f"weights/{name}.safetensors")
        if wanted is None:
            continue
        with ThreadPoolExecutor(1) as beside:  # hashing takes about as long as copying
            present = beside.submit(checksum, path)
            yield from read(path)
            if present.result() != wanted:
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
        header, pairs = parsed_header(path, file.read(min(length, path.stat().st_size)))
        if not header:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for name, entry in header.items():
                yield name, _tensor(path, name, entry, data, 8 + length, pair=name in pairs)


def parsed_header(path: Path, raw: bytes) -> tuple[dict[str, Any], set[str]]:
    """The entries of the header, without its metadata, and the names of complex128 tensors."""
    try:
        header = json.loads(raw)
        metadata = header.pop("__metadata__", {})
        return header, set(json.loads(metadata.get(PAIRS, "[]")))
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        message = f"{path} is no safetensors file, or cut short"
        raise InputError(message) from error


def _tensor(
    path: Path, name: str, entry: dict[str, Any], data: mmap.mmap, start: int, *, pair: bool
) -> torch.Tensor:
    """One tensor, copied out of the file."""
    try:
        begin, end = entry["data_offsets"]
        dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
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
