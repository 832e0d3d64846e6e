"""The exported folder: plan, report, scripts of ranks, one module per stage, weights.

If all ranks hold rows of the vocabulary's tables, there is a module for it as well. SHA256SUMS
lists all written files.

    .out-x1y2/new   written first        out ──► .out-x1y2/old      new ──► out
                                         files not from an export move from old to out
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from parcompiler import documents
from parcompiler.capture.templates import identifier
from parcompiler.codegen.functions import counts_module, hooks_module
from parcompiler.codegen.launchers import Launch
from parcompiler.codegen.quoting import fenced, markdown
from parcompiler.codegen.rank import further_script, rank_program, rank_script
from parcompiler.codegen.stage import StageWriter
from parcompiler.codegen.vocabulary import held_whole, vocabulary_module
from parcompiler.errors import InputError
from parcompiler.graph import Graph
from parcompiler.lower.lowered import Lowered
from parcompiler.pieces import own_rows
from parcompiler.report.names import numbers, ranges
from parcompiler.runtime.files import SUMS, listing, sums
from parcompiler.runtime.tensor_files import write

TORCHRUN = Launch()
MOST_SCRIPTS = 64  # scripts for single ranks are for readers: more would be no use


def export(
    path: Path,
    lowered: Lowered,
    files: Mapping[str, str],
    *,
    weights: bool,
    standalone: bool,
) -> Path:
    """Write the folder; an older export at the same place is replaced once all is written.

    `files` are the texts in it by name: those of `texts`, and the documents beside them.

    Files not from an export stay. Raises InputError if one of these is in the way, if `path` is
    something other than an export, or if the folder cannot be written: then the older one is
    intact.
    """
    place = Path(os.path.realpath(path))  # a link to a folder stays one
    try:
        _others(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
        new, old = beside / "new", beside / "old"
        try:
            new.mkdir()
            for name, text in files.items():
                documents.write(new / name, text)
            saved = dict(_saved(new / "weights", lowered, parameters=weights))
            if standalone:
                _copy_runtime(new)
            documents.write(new / SUMS, listing(new, saved))
            _replace(place, new, old)
        finally:
            shutil.rmtree(new, ignore_errors=True)
            with suppress(OSError):
                beside.rmdir()
    except OSError as error:
        message = (
            f"cannot export to {path} ({error.strerror or error}): nothing that was there has "
            "changed"
        )
        raise InputError(message) from error
    return path


def texts(
    lowered: Lowered,
    devices: Sequence[str],
    report: str | None,
    *,
    standalone: bool,
    launch: Launch = TORCHRUN,
    ranks: Iterable[int] | None = None,
    compiled: bool = False,
) -> dict[str, str]:
    """The files that people read, by name: one for each stage and pipeline coordinate,
    `vocabulary.py` where it is on all ranks, `hooks.py` where the model changes gradients,
    `main.py`, `README.md`, and the file of a cluster's launcher.

    `ranks` have a script under their own number; None: all, where there are at most MOST_SCRIPTS.
    `compiled` is the default of the scripts for compiling layers. A `report` of None is not in
    README.md.
    """
    grid = lowered.grid
    if ranks is None:
        ranks = range(grid.size if grid.size <= MOST_SCRIPTS else 0)
    files = {
        f"stage_{stage.index}.py": StageWriter(lowered, stage, devices[stage.rank]).text()
        for stage in lowered.stages
    }
    if lowered.vocabulary is not None:
        files["vocabulary.py"] = vocabulary_module(lowered, devices[0])
    if lowered.graph.hooks:
        files["hooks.py"] = hooks_module(lowered.graph, devices[0])
    if lowered.graph.counts is not None:
        files["counts.py"] = counts_module(lowered, devices[0])
    first = range(0, grid.size, grid.copies)
    for rank in sorted({*first, *ranks}):
        program = rank_program(lowered, rank, devices[grid.coordinate(rank).pipeline])
        files[f"rank_{rank}.py"] = (
            rank_script(lowered, program, compiled=compiled)
            if rank in first
            else further_script(lowered, program)
        )
    facts = {"standalone": standalone, **_facts(lowered)}
    facts["report"] = None if report is None else fenced(report)
    facts |= launch.facts(str(facts["model"]), grid.size, devices[0])
    for name in ("main.py", "README.md", *([launch.file] if launch.file else [])):
        files[name] = _templates().get_template(f"{name}.jinja").render(facts)
    return files


@cache
def _templates() -> Environment:
    """The environment of the templates, cached."""
    return Environment(
        loader=PackageLoader("parcompiler.codegen"), undefined=StrictUndefined, trim_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip


def _facts(lowered: Lowered) -> dict[str, object]:
    """The variables of the templates; names from the model are quoted here."""
    copies = lowered.grid.copies
    stages = [
        {
            "rank": numbers(range(stage.rank * copies, (stage.rank + 1) * copies)),
            "index": stage.index,
            "blocks": ranges([markdown(call.block.name) for call in stage.calls]),
        }
        for stage in lowered.stages
    ]
    model = identifier(lowered.graph.name)
    return {
        "model": model,
        "size": lowered.grid.size,
        "copies": copies,
        "stages": stages,
        "vocabulary": lowered.vocabulary is not None,
        "hooks": bool(lowered.graph.hooks),
    }


def _others(place: Path) -> list[Path]:
    """Files and whole folders within an export that no export has written, as relative paths.

    Raises InputError if the place is something other than an export.
    """
    if not os.path.lexists(place):
        return []
    if not place.is_dir() or (any(place.iterdir()) and not (place / SUMS).exists()):
        message = (
            f"{place} exists and is no export of parcompiler (it has no {SUMS}): give another "
            "path, or remove it"
        )
        raise InputError(message)
    listed = {Path(SUMS), *map(Path, sums(place))} if (place / SUMS).exists() else set()
    folders = {Path(), *(folder for name in listed for folder in name.parents)}
    return [
        folder / item.name
        for folder in sorted(folders)
        if (place / folder).is_dir() and not (place / folder).is_symlink()
        for item in sorted((place / folder).iterdir())
        if folder / item.name not in listed | folders and item.name != "__pycache__"
    ]


def _replace(place: Path, new: Path, old: Path) -> None:
    """Put the folder `new` at `place`, with the files there that no export has written."""
    for name in _others(place):
        if os.path.lexists(new / name):
            message = (
                f"{place / name} has the name of a file of the export, and was not written by one: "
                "move it"
            )
            raise InputError(message)
    if not os.path.lexists(place):
        new.rename(place)
        return
    place.rename(old)
    try:
        new.rename(place)
    except BaseException:
        old.rename(place)
        raise
    for name in _others(old):
        try:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (old / name).rename(place / name)
        except OSError as error:
            message = f"exported, but {old / name} cannot go back to {place / name} ({error})"
            raise InputError(message) from error
    shutil.rmtree(old, ignore_errors=True)


def _stored(graph: Graph, names: Iterable[str], *, parameters: bool) -> dict[str, torch.Tensor]:
    """Tensors under the model's names; buffers always, parameters on request."""
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        item, tensor = graph.by_name[name], graph.tensors[name]
        if parameters and tensor.is_meta:
            message = (
                f"{name!r} is on the meta device and has no values to export: pass weights=False, "
                "or build the model on the CPU"
            )
            raise InputError(message)
        if (parameters or item.buffer) and not tensor.is_meta:
            masters = graph.narrow is not None and item.dtype == graph.narrow
            tensors[name] = tensor.detach().to("cpu", tensor.dtype if masters else item.dtype)
    return tensors


def _saved(folder: Path, lowered: Lowered, *, parameters: bool) -> Iterator[tuple[Path, str]]:
    """Write a file of tensors for each stage, and where all ranks of a pipeline have rows of the
    vocabulary, one for each rank: its rows of tables, and tensors that it has whole. Yields the
    files with their checksums."""
    folder.mkdir()
    for stage in lowered.stages:
        tensors = _stored(lowered.graph, stage.tensors, parameters=parameters)
        path = folder / f"stage_{stage.index}.safetensors"
        yield path, write(path, tensors)
    spread, n = lowered.vocabulary, lowered.size * lowered.tensor
    if spread is None:
        return
    names = (*spread.tensors, *held_whole(lowered.graph, spread))
    whole = _stored(lowered.graph, names, parameters=parameters)
    for index in range(n):
        rows = dict(whole)
        for name in whole.keys() & spread.tensors.keys():
            size = spread.tensors[name]
            span = own_rows(size, n, index)
            dim = whole[name].shape.index(size)
            rows[name] = whole[name].narrow(dim, span.start, span.size)
        path = folder / f"vocabulary_{index}.safetensors"
        yield path, write(path, rows)


def _copy_runtime(path: Path) -> None:
    """The part of parcompiler that rank scripts import, for clusters that have torch only."""
    source = Path(__file__).parent.parent
    target = path / "parcompiler"
    skip = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(source / "runtime", target / "runtime", ignore=skip)
    names = "again ctc data_updates errors grid instruction pieces ring temporary"
    for name in names.split():
        shutil.copy(source / f"{name}.py", target / f"{name}.py")
    text = '"""The runtime of parcompiler, copied beside the scripts that use it."""\n'
    documents.write(target / "__init__.py", text)
