"""Published weights: folders of safetensors as Hugging Face has them, read and written by pieces.

    model.safetensors                     or shards: model-00001-of-00002.safetensors ...
    model.safetensors.index.json          with "weight_map": name -> shard
    config.json

A rank reads the boxes that it holds. Shards are written from a checkpoint, one tensor in memory at
a time, each shard by another rank; so no host ever holds the whole model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch

from parcompiler.errors import InputError, check_no_pipe
from parcompiler.runtime.boxes import Box
from parcompiler.runtime.checkpoint.folder import Checkpoint, json_of, sync
from parcompiler.runtime.checkpoint.folder import write as write_bytes
from parcompiler.runtime.tensor_files import Described, File, write

FILE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
SHARD_SIZE = 5 * 10**9  # bytes, as transformers has it
# Modules that transformers has renamed since their publication, and tensors that it has fused.
_MODULES = (("block_sparse_moe", "mlp"),)
_PROJECTIONS = {
    "w1": ("gate_up_proj", 0, 2), "gate_proj": ("gate_up_proj", 0, 2),
    "w3": ("gate_up_proj", 1, 2), "up_proj": ("gate_up_proj", 1, 2),
    "w2": ("down_proj", 0, 1), "down_proj": ("down_proj", 0, 1),
}  # fmt: skip
_OF_EXPERT = re.compile(rf"(.*\.experts)\.(\d+)\.({'|'.join(_PROJECTIONS)})\.weight")
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class Pretrained:
    """A folder of published weights; a tensor is read when it is asked for, by pieces."""

    path: Path
    files: Mapping[str, str]  # by the name of the tensor
    opened: dict[str, File] = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._file(name).shape(name)

    def read(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Copy a box of a tensor into `target`, which may have another dtype. Where the tensor is
        that of an expert, both have a dimension of size 1 before its own."""
        if len(box.sizes) > len(self.shape(name)):
            box, target = Box(box.offsets[1:], box.sizes[1:]), target.squeeze(0)
        self._file(name).read(name, box, target)

    def _file(self, name: str) -> File:
        """The file of a tensor, opened once."""
        file_name = self.files[name]
        if file_name not in self.opened:
            self.opened[file_name] = File(self.path / file_name)
        if name not in self.opened[file_name].names():
            message = f"{self.path / file_name} lacks {name!r}, which {INDEX} says it has"
            raise InputError(message)
        return self.opened[file_name]


def opened(folder: Path) -> Pretrained:
    """The weights in a folder, or in one file. Raises InputError where there are none."""
    if folder.is_file():
        folder, single = folder.parent, folder.name
    else:
        single = FILE
    if (folder / single).is_file():
        file = File(folder / single)
        return Pretrained(folder, dict.fromkeys(file.names(), single), {single: file})
    if not (folder / INDEX).is_file():
        message = f"{folder} has no published weights: neither {FILE} nor {INDEX}"
        raise InputError(message)
    files = json_of(folder / INDEX, "copy the folder again").get("weight_map")
    if not isinstance(files, dict) or not all(
        isinstance(name, str) and PurePosixPath(name).name == name for name in files.values()
    ):
        message = f"{folder / INDEX} is damaged: it has no map of names to files of its folder"
        raise InputError(message)
    return Pretrained(folder, files)


class Place(NamedTuple):
    """Which part of a model's tensor a published tensor is: all of it, or the slice of an `expert`,
    and of that slice number `part` of `parts` along the next dimension."""

    name: str
    expert: int | None = None
    part: int = 0
    parts: int = 1

    def box(self, shape: Sequence[int]) -> Box:
        """The part of a tensor of this shape."""
        whole = Box.whole(shape)
        if self.expert is None or len(shape) < 2:
            return whole
        size = shape[1] // self.parts
        return whole.narrowed(0, self.expert, 1).narrowed(1, self.part * size, size)


def renamed(stored: Collection[str], known: Collection[str]) -> dict[str, Place]:
    """The places of a file's tensors in a model whose names are `known`.

    The file may be of the model without its head, or of a model within another: a first component
    is added or removed where that fits more names. Experts may be stored one by one, where the
    model has a stacked tensor.

    >>> found = renamed(["h.0.weight", "wte.weight"], ["transformer.h.0.weight", "lm_head.weight"])
    >>> [place.name for place in found.values()]
    ['transformer.h.0.weight', 'transformer.wte.weight']
    >>> renamed(["0.experts.2.up_proj.weight"], ["0.experts.gate_up_proj"]).popitem()[1]
    Place(name='0.experts.gate_up_proj', expert=2, part=1, parts=2)
    """
    firsts = sorted({name.partition(".")[0] for name in known if "." in name})
    ways = [{name: name for name in stored}]
    ways += [{name: f"{first}.{name}" for name in stored} for first in firsts]
    ways += [
        {name: name.removeprefix(f"{first}.") for name in stored}
        for first in sorted({name.partition(".")[0] for name in stored if "." in name})
    ]
    places = [{name: _place(new, known) for name, new in way.items()} for way in ways]
    hits = [sum(place is not None for place in way.values()) for way in places]
    best = hits.index(max(hits))
    return {
        name: place or places[0][name] or Place(ways[best][name])
        for name, place in places[best].items()
    }


def _place(name: str, known: Collection[str]) -> Place | None:
    """The place of a published tensor in a model; None if it has none."""
    if name in known:
        return Place(name)
    for old, new in _MODULES:
        name = name.replace(f".{old}.", f".{new}.")
    if match := _OF_EXPERT.fullmatch(name):
        fused, part, parts = _PROJECTIONS[match[3]]
        place = Place(f"{match[1]}.{fused}", int(match[2]), part, parts)
    else:
        place = Place(name)
    return place if place.name in known else None


def grouped(mapping: Mapping[str, Place]) -> dict[str, list[str]]:
    """The published tensors by the tensor of the model that they are parts of."""
    groups: dict[str, list[str]] = {}
    for stored, place in mapping.items():
        groups.setdefault(place.name, []).append(stored)
    return groups


def boxes(
    source: Pretrained, mapping: Mapping[str, Place], stored: Sequence[str], shape: Sequence[int]
) -> list[tuple[str, Box]]:
    """The box of each published tensor within the model's tensor of this shape. Raises InputError
    when they do not cover it."""
    pairs = [(key, mapping[key].box(shape)) for key in stored]
    for key, box in pairs:
        sizes = box.sizes if mapping[key].expert is None else box.sizes[1:]
        if source.shape(key) != tuple(sizes) or not box.fits(shape):
            message = (
                f"{mapping[key].name!r} has another shape ({tuple(shape)} needed, "
                f"{source.shape(key)} stored as {key!r})"
            )
            raise InputError(message)
    if sum(box.count for _, box in pairs) != Box.whole(shape).count:
        message = f"{mapping[stored[0]].name!r} lacks experts ({len(stored)} tensors stored)"
        raise InputError(message)
    return pairs


@dataclass(frozen=True)
class PublishedFiles:
    """The files of a checkpoint's model, each with the names of its tensors, in `dtype` (None:
    unchanged; integers stay unchanged)."""

    checkpoint: Checkpoint
    dtype: torch.dtype | None
    files: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, checkpoint: Checkpoint, size: int, dtype: torch.dtype | None) -> PublishedFiles:
        """Files of about `size` bytes each."""
        groups, full = list[list[str]]([[]]), 0
        for name in checkpoint.names:
            count = cls(checkpoint, dtype, {})._described(name).size
            if groups[-1] and full + count > size:
                groups.append([])
                full = 0
            groups[-1].append(name)
            full += count
        n = len(groups)
        files = {
            f"model-{k:05d}-of-{n:05d}.safetensors": names for k, names in enumerate(groups, 1)
        }
        return cls(checkpoint, dtype, files if n > 1 else {FILE: groups[0]})

    def write(self, folder: Path, part: int = 0, parts: int = 1) -> None:
        """Write each `parts`-th file from number `part`, under a hidden name. Raises OSError."""
        for file in sorted(self.files)[part::parts]:
            hidden = folder / f".{file}.partial"
            hidden.unlink(missing_ok=True)
            described = {name: self._described(name) for name in self.files[file]}
            write(hidden, described, {"format": "pt"}, durable=True)

    def publish(self, folder: Path, config: Any) -> None:
        """Give hidden files their names, write index and configuration, and remove other weights.

        `config` is what `configuration` returns. Raises OSError.
        """
        stale = {path for path in folder.iterdir() if _WEIGHTS.fullmatch(path.name)}
        for path in stale - {folder / name for name in self.files}:
            path.unlink()
        for file in self.files:
            os.replace(folder / f".{file}.partial", folder / file)
        if len(self.files) > 1:
            places = {name: file for file, names in sorted(self.files.items()) for name in names}
            total = sum(self._described(name).size for name in places)
            index = {"metadata": {"total_size": total}, "weight_map": places}
            write_bytes(folder / INDEX, json.dumps(index, indent=2).encode())
        if hasattr(config, "save_pretrained"):
            config.save_pretrained(str(folder))
        elif config is not None:
            (folder / CONFIG).unlink(missing_ok=True)
            write_bytes(folder / CONFIG, json.dumps(dict(config), indent=2).encode())
        sync(folder)

    def _described(self, name: str) -> Described:
        """A tensor as it is written."""
        entry = self.checkpoint.entries[f"model/{name}"]
        dtype = self.dtype if self.dtype and entry.dtype.is_floating_point else entry.dtype
        return Described(
            dtype, entry.shape, lambda: self.checkpoint.whole(f"model/{name}").to(dtype)
        )


def configuration(config: Any) -> Any:
    """A configuration that is written beside weights: an object with `save_pretrained(folder)`, or
    a dictionary, which a path is read to; None: none. Raises InputError for anything else."""
    if isinstance(config, str | Path):
        path = Path(config)
        path = path / CONFIG if path.is_dir() else path
        check_no_pipe(path)
        try:
            config = json.loads(path.read_bytes())
        except OSError as error:
            message = f"cannot read the configuration {path} ({error.strerror})"
            raise InputError(message) from error
        except (ValueError, RecursionError) as error:
            message = f"the configuration {path} is not JSON ({error})"
            raise InputError(message) from error
    if not (config is None or isinstance(config, Mapping) or hasattr(config, "save_pretrained")):
        message = (
            "config must be a dictionary, the path of a config.json, or a configuration of "
            f"transformers ({type(config).__name__} given)"
        )
        raise InputError(message)
    return config
