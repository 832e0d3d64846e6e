"""The files of an exported folder: their checksums, and weights, which torch alone can read.

    sha256sum --check SHA256SUMS        lists files that were changed since the export

Ranks that start compare the checksums of all scripts and weights. Scripts may be edited if the
folders of all ranks have the edit; weights may not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from parcompiler.errors import InputError, ParcompilerError, check_no_pipe
from parcompiler.runtime.program import RankProgram
from parcompiler.runtime.tensor_files import read

REQUEST = "request.json"  # the request to the compiler
SUMS = "SHA256SUMS"  # what makes a folder an export
_COMPARED = (".py", ".safetensors")  # what ranks run and load


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """For ranks to compare: the `digest` of scripts as they are and of weights as they were
    exported.

    `edited` are the scripts that were changed since.
    """

    digest: str
    edited: tuple[str, ...] = ()


def checksum(path: Path, advice: str = "copy or export the folder again") -> str:
    """The SHA-256 of a file in hexadecimal. Raises InputError, with `advice`, when it cannot be
    read."""
    check_no_pipe(path)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        message = f"cannot read {path} ({error.strerror}): {advice}"
        raise InputError(message) from error


def listing(folder: Path, known: Mapping[Path, str]) -> str:
    """The text of SHA256SUMS for all files in a folder, with the checksums of some."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = ((known.get(path) or checksum(path), path.relative_to(folder)) for path in files)
    return "".join(f"{digest}  {name.as_posix()}\n" for digest, name in sums)


def sums(
    folder: Path, advice: str = "remove the folder, and copy or export it again"
) -> dict[str, str]:
    """The checksums of a folder's files by name. Raises InputError, with `advice`, where they
    cannot be read."""
    path = folder / SUMS
    check_no_pipe(path)
    try:
        text = path.read_text(encoding="utf-8")
        if "\0" in text:  # no file has it in its name
            raise ValueError(text)
        lines = text.splitlines()
        listed = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except OSError as error:
        message = f"cannot read {path} ({error.strerror}): {advice}"
        raise InputError(message) from error
    except ValueError as error:
        message = f"{path} is damaged: {advice}"
        raise InputError(message) from error
    if any(PurePosixPath(name).is_absolute() or ".." in name.split("/") for name in listed):
        message = f"{path} lists files outside of its folder: {advice}"
        raise InputError(message)
    return listed


def request_of(folder: Path) -> dict[str, Any]:
    """The request to the compiler that an export keeps, as `document` returns it."""
    return document(folder / REQUEST)


def document(path: Path) -> dict[str, Any]:
    """The data of a JSON file of an export; empty if there is none. Raises InputError where it
    cannot be read."""
    check_no_pipe(path)
    try:
        content = json.loads(path.read_bytes()) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        message = f"cannot read {path} ({error}): copy or export the folder again"
        raise InputError(message) from error
    return content if isinstance(content, dict) else {}


def fingerprint(folder: Path) -> Fingerprint:
    """The fingerprint that ranks compare which start from copies of a folder.

    Raises InputError when a script is missing.
    """
    exported = {n: digest for n, digest in sums(folder).items() if n.endswith(_COMPARED)}
    present = {n: checksum(folder / n) for n in exported if n.endswith(".py")}
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted((exported | present).items()))
    edited = tuple(sorted(name for name in present if present[name] != exported[name]))
    return Fingerprint(hashlib.sha256(text.encode()).hexdigest()[:15], edited)


@contextmanager
def loading(script: Path) -> Iterator[None]:
    """Context for running a script of an exported folder as a module.

    Turns its errors into InputError, which names the scripts that were edited.
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


def stored(folder: Path, program: RankProgram) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of a rank's weights in an exported folder: of its stages, and its rows.

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
