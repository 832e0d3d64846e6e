"""The folders of checkpoints: completing one, finding the newest, reading it.

A checkpoint is written into a hidden folder. When all files are on the disk, and the list of their
checksums, the folder is renamed; so a folder with its final name is complete, whenever a machine
fails.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parcompiler.errors import InputError, check_no_pipe
from parcompiler.runtime.boxes import Box
from parcompiler.runtime.files import SUMS, checksum, sums
from parcompiler.runtime.tensor_files import File

FORMAT = 2  # of checkpoint.json and tensors.json
FACTS, TENSORS = "checkpoint.json", "tensors.json"
ADVICE = "restore it from a copy, or load an older checkpoint"
_NAME = re.compile(r"step_\d+(-\d+)?")
_PARTIAL = re.compile(r"\.step_\d+(-\d+)?\.(partial|removed)")


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a piece of a tensor is stored: under `key` of `file`."""

    box: Box
    file: str
    key: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a checkpoint; `note` is a remark of its owner."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Stored, ...]
    note: str = ""

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return Box.whole(self.shape).count * self.dtype.itemsize


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, made by `read`: `facts` are checkpoint.json; tensors are read on
    demand, piece by piece."""

    path: Path
    facts: Mapping[str, Any]
    entries: Mapping[str, Entry]
    files: dict[str, File]

    @property
    def step(self) -> int:
        """How many steps were made before it."""
        return int(self.facts["step"])

    @property
    def names(self) -> list[str]:
        """The names of the model's state dict that it has, sorted."""
        keys = (key.partition("/") for key in self.entries)
        return sorted(name for kind, _, name in keys if kind == "model")

    def read(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Copy a box of a tensor into `target`, from whatever pieces are stored.

        Raises InputError when they do not cover it, or a file is not as the index says.
        """
        for file, stored, common in self.pieces(name, box):
            file.read(stored.key, common.within(stored.box), common.within(box).of(target))

    def pieces(self, name: str, box: Box) -> list[tuple[File, Stored, Box]]:
        """The stored pieces of a box of a tensor: the file of each, and what it has of the box.
        Raises InputError as `read` does."""
        entry = self.entries[name]
        pieces = [
            (self._file(stored, entry), stored, common)
            for stored in entry.pieces
            if (common := box.overlap(stored.box)).count
        ]
        count = sum(common.count for _, _, common in pieces)
        if count != box.count:
            message = f"{self.path} has not all of {name!r} ({count} of {box.count} elements)"
            raise InputError(message)
        return pieces

    def whole(self, name: str) -> torch.Tensor:
        """All of a tensor."""
        entry = self.entries[name]
        target = torch.empty(entry.shape, dtype=entry.dtype)
        self.read(name, Box.whole(entry.shape), target)
        return target

    def gaps(self) -> list[str]:
        """Faults: tensors whose pieces do not make the whole, files that are not as the index
        says."""
        faults = []
        for name, entry in self.entries.items():
            count = sum(stored.box.count for stored in entry.pieces)
            if count != Box.whole(entry.shape).count:
                faults.append(f"{self.path} has not all of {name!r}")
            for stored in entry.pieces:
                try:
                    self._file(stored, entry)
                except InputError as error:
                    faults.append(str(error))
        return faults

    def _file(self, stored: Stored, entry: Entry) -> File:
        """The file of a piece, opened once."""
        if stored.file not in self.files:
            self.files[stored.file] = File(self.path / stored.file)
        file = self.files[stored.file]
        if stored.key not in file.names() or (file.dtype(stored.key), file.shape(stored.key)) != (
            entry.dtype,
            stored.box.sizes,
        ):
            message = f"{file.path} is not what {TENSORS} says of it: {stored.key!r}"
            raise InputError(message)
        return file


def read(path: Path) -> Checkpoint:
    """The complete checkpoint at a path. Raises InputError where there is none, or it is
    damaged."""
    facts, index = json_of(path / FACTS), json_of(path / TENSORS)
    if facts.get("format") != FORMAT:
        message = f"{path} is a checkpoint of another version ({facts.get('format')!r})"
        raise InputError(message)
    if not _is_sound(facts):
        message = f"{path / FACTS} is damaged: {ADVICE}"
        raise InputError(message)
    try:
        entries = {
            name: Entry(
                dtype_of(item["dtype"]),
                tuple(item["shape"]),
                tuple(
                    Stored(Box(tuple(piece[2]), tuple(piece[3])), piece[0], piece[1])
                    for piece in item["pieces"]
                ),
                item.get("note", ""),
            )
            for name, item in index.items()
        }
        files = {stored.file for entry in entries.values() for stored in entry.pieces}
        fit = all(s.box.fits(entry.shape) for entry in entries.values() for s in entry.pieces)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        message = f"{path / TENSORS} is damaged: {ADVICE}"
        raise InputError(message) from error
    if not fit or not files <= sums(path, ADVICE).keys():
        message = f"{path / TENSORS} is damaged: {ADVICE}"
        raise InputError(message)
    return Checkpoint(path, facts, entries, {})


def _is_sound(facts: Mapping[str, Any]) -> bool:
    """Whether `facts` have the entries of checkpoint.json, each with its type."""
    match facts:
        case {
            "step": int(),
            "samples": int(),
            "calls": [int(), int()],
            "mesh": [int(pipeline), int(data), int(tensor)],
            "seeds": list(seeds),
            "scale": None | [int() | float(), int(), int()],
            "extra": dict(extra),
        }:
            ranks = len(seeds) == pipeline * data * tensor
            sound = ranks and all(isinstance(seed, int) for seed in seeds)
            sound = sound and _is_sound_optimizer(facts.get("optimizer"))
            return sound and all(isinstance(states, list) for states in extra.values())
    return False


def _is_sound_optimizer(states: object) -> bool:
    """Whether the states of an optimizer, if there are any, have their entries with their types."""
    match states:
        case None:
            return True
        case {"kind": str(), "groups": list(groups), "values": dict(values), "own": list(own)}:
            sound = all(isinstance(numbers, dict) for numbers in values.values())
            sound = sound and all(isinstance(pair, list) and len(pair) == 2 for pair in own)
            return sound and all(map(_is_sound_group, groups))
    return False


def _is_sound_group(group: object) -> bool:
    """Whether a group of an optimizer has names and options."""
    match group:
        case {"names": list(names), "options": dict()}:
            return all(isinstance(name, str) for name in names)
    return False


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name. Raises ValueError for anything else."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        message = f"{name!r} is no dtype"
        raise ValueError(message)
    return dtype


def json_of(path: Path, advice: str = ADVICE) -> dict[str, Any]:
    """The contents of a JSON file. Raises InputError, with `advice` where it is damaged."""
    check_no_pipe(path)
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        message = f"{path.parent} is no checkpoint: cannot read {path.name} ({error.strerror})"
        raise InputError(message) from error
    except (ValueError, RecursionError) as error:
        message = f"{path} is damaged: {advice}"
        raise InputError(message) from error
    if not isinstance(content, dict):
        message = f"{path} is damaged: {advice}"
        raise InputError(message)
    return content


def damaged(path: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Faults of files whose checksums differ; checks each `parts`-th file from number `part`."""
    faults = []
    for name, digest in sorted(sums(path, ADVICE).items())[part::parts]:
        try:
            if checksum(path / name, ADVICE) != digest:
                faults.append(f"{path / name} is damaged (it is not as it was written)")
        except InputError as error:
            faults.append(str(error).removesuffix(f": {ADVICE}"))
    return faults


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, the newest last: in the order they were written in."""
    checkpoints = []
    for item in _named(folder):
        with suppress(InputError):
            checkpoints.append((_serial(item), item.name, item))
    return [item for _, _, item in sorted(checkpoints)]


def begun(folder: Path) -> bool:
    """Whether a folder has checkpoints, complete or damaged: what `find` finds, or refuses."""
    return bool(_named(folder))


def find(folder: Path) -> Path:
    """`folder` if it is a checkpoint, else the newest in it. Raises InputError where there is none,
    and where one of a later step is damaged (it was complete once)."""
    if (folder / SUMS).is_file() and (folder / FACTS).is_file():
        return folder
    checkpoints = complete(folder)
    last = _order(checkpoints[-1]) if checkpoints else (-1, 0)
    damaged = [item for item in _named(folder) if item not in checkpoints and _order(item) > last]
    if damaged:
        worst = max(damaged, key=_order)
        advice = (
            f"give {checkpoints[-1]} to go on from that"
            if checkpoints
            else "restore it from a copy"
        )
        message = f"{worst} is damaged ({FACTS} is not as {SUMS} says): {advice}"
        raise InputError(message)
    if not checkpoints:
        reason = "there is no complete one" if folder.is_dir() else "it is not a folder"
        reason = reason if folder.exists() else "there is no such folder"
        message = f"no checkpoint in {folder} ({reason})"
        raise InputError(message)
    return checkpoints[-1]


def _named(folder: Path) -> list[Path]:
    """The items of a folder that are named like checkpoints."""
    try:
        return [item for item in folder.iterdir() if _NAME.fullmatch(item.name)]
    except OSError:
        return []


def _order(path: Path) -> tuple[int, int]:
    """The step in the name of a checkpoint, and its number among those of that step."""
    _, step, *more = re.split("[_-]", path.name)
    return int(step), int(more[0]) if more else 1


def _serial(path: Path) -> int:
    """The number of a checkpoint among those of its folder. Raises InputError for a damaged one."""
    if not (path / SUMS).is_file() or checksum(path / FACTS) != sums(path).get(FACTS):
        message = f"{path / FACTS} is damaged: {ADVICE}"
        raise InputError(message)
    return int(json_of(path / FACTS).get("serial", 0))


def begin(folder: Path, step: int) -> tuple[Path, int]:
    """A hidden folder for the checkpoint of a step, and its number among those of the folder.

    Leftovers of unfinished saves are removed. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for item in folder.iterdir():
        if _PARTIAL.fullmatch(item.name):
            shutil.rmtree(item, ignore_errors=True)
    name, number = f"step_{step:08d}", 1
    while (folder / name).exists():
        number += 1
        name = f"step_{step:08d}-{number}"
    serials = [json_of(item / FACTS).get("serial", 0) for item in complete(folder)]
    partial = folder / f".{name}.partial"
    partial.mkdir()
    return partial, max(map(int, serials), default=0) + 1


def final(partial: Path) -> Path:
    """The path of a hidden folder once it is complete."""
    return partial.parent / partial.name.removeprefix(".").removesuffix(".partial")


def finish(partial: Path, documents: Mapping[str, Any], written: Mapping[str, str]) -> Path:
    """Complete a checkpoint whose tensor files are written, with these checksums.

    Raises OSError; then the folder is unchanged.
    """
    digests = dict(written)
    for name, document in documents.items():
        text = json.dumps(document, indent=1 if name == FACTS else None).encode()
        write(partial / name, text)
        digests[name] = hashlib.sha256(text).hexdigest()
    listed = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    write(partial / SUMS, listed.encode())
    sync(partial)
    path = final(partial)
    partial.rename(path)
    sync(path.parent)
    return path


def prune(folder: Path, keep: int) -> None:
    """Remove all complete checkpoints but the newest `keep`. Folders that cannot be removed
    stay."""
    for path in complete(folder)[:-keep]:
        hidden = path.with_name(f".{path.name}.removed")
        with suppress(OSError):
            path.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def write(path: Path, data: bytes) -> None:
    """Write a new file and flush it to disk. Raises OSError."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Flush the names in a folder to disk. Raises OSError."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def index(parts: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The index of all tensors, from the descriptions of each file's tensors."""
    entries: dict[str, Any] = {}
    for file, tensors in parts:
        for name, item in tensors.items():
            entry = entries.setdefault(name, {**item, "pieces": []})
            entry["pieces"] += [[file, *piece] for piece in item["pieces"]]
    return dict(sorted(entries.items()))
