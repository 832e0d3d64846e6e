"""The exported folder: plan, report, one script per rank, one module per stage, weights.

Where all ranks hold rows of the vocabulary's tables, there is a module of it as well.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from safetensors.torch import save_file

from parcompiler.capture.templates import identifier
from parcompiler.codegen.launchers import Launch
from parcompiler.codegen.quoting import fenced, markdown
from parcompiler.codegen.rank import rank_script
from parcompiler.codegen.stage import StageWriter
from parcompiler.codegen.vocabulary import held_whole, vocabulary_module
from parcompiler.errors import InputError
from parcompiler.graph import Graph
from parcompiler.lower.lowered import Lowered, Spread
from parcompiler.pieces import own_rows
from parcompiler.plan import Plan
from parcompiler.report import Report
from parcompiler.report.names import ranges
from parcompiler.runtime import RankProgram

MARK = "plan.json"  # what makes a folder an export
TORCHRUN = Launch()


def export(
    path: Path,
    plan: Plan,
    lowered: Lowered,
    programs: Sequence[RankProgram],
    report: Report,
    *,
    weights: bool,
    standalone: bool,
    launch: Launch = TORCHRUN,
) -> Path:
    """Write the folder; an older export at the same place is replaced."""
    _clear(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot write to {path} ({error.strerror}): give another path"
        raise InputError(message) from error
    _write(path / MARK, plan.to_json())
    _write(path / "report.json", report.to_json())
    found = texts(lowered, programs, str(report), standalone=standalone, launch=launch)
    for name, text in found.items():
        _write(path / name, text)
    for stage in lowered.stages:
        stored = _stored(lowered.graph, stage.tensors, parameters=weights)
        _save(path / "weights" / f"stage_{stage.index}.safetensors", stored)
    if lowered.vocabulary is not None:
        _save_rows(path / "weights", lowered, lowered.vocabulary, parameters=weights)
    if standalone:
        _copy_runtime(path)
    return path


def texts(
    lowered: Lowered,
    programs: Sequence[RankProgram],
    report: str,
    *,
    standalone: bool,
    launch: Launch = TORCHRUN,
) -> dict[str, str]:
    """The files that people read, by name: one per stage and rank, `vocabulary.py` where it is on
    all ranks, `main.py`, `README.md`, and what a cluster's launcher reads."""
    devices = [programs[lowered.grid.rank(r)].device for r in range(lowered.size)]
    found = {
        f"stage_{stage.index}.py": StageWriter(lowered, stage, devices[stage.rank]).text()
        for stage in lowered.stages
    }
    if lowered.vocabulary is not None:
        found["vocabulary.py"] = vocabulary_module(lowered, devices[0])
    found |= {f"rank_{item.rank}.py": rank_script(lowered, item) for item in programs}
    facts = {"standalone": standalone, "report": fenced(report), **_facts(lowered)}
    facts |= launch.facts(str(facts["model"]), len(programs), devices[0])
    environment = Environment(
        loader=PackageLoader("parcompiler.codegen"), undefined=StrictUndefined, trim_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    for name in ("main.py", "README.md", *([launch.file] if launch.file else [])):
        found[name] = environment.get_template(f"{name}.jinja").render(facts)
    return found


def _facts(lowered: Lowered) -> dict[str, object]:
    """What the templates say of a program; names from the model are made harmless here."""
    stages = [
        {
            "rank": ", ".join(map(str, lowered.grid.replicas([stage.rank]))),
            "index": stage.index,
            "blocks": ranges([markdown(call.block.name) for call in stage.calls]),
        }
        for stage in lowered.stages
    ]
    model = identifier(lowered.graph.name)
    return {
        "model": model,
        "size": lowered.grid.size,
        "stages": stages,
        "vocabulary": lowered.vocabulary is not None,
    }


def _clear(path: Path) -> None:
    """Remove an older export; refuse to touch anything else."""
    if not path.exists():
        return
    if not path.is_dir() or (any(path.iterdir()) and not (path / MARK).exists()):
        message = f"{path} exists and is no export of parcompiler: give another path, or remove it"
        raise InputError(message)
    shutil.rmtree(path)


def _write(path: Path, text: str) -> None:
    """Write a text file, the same bytes on every system."""
    path.write_text(text, encoding="utf-8", newline="\n")


def _stored(graph: Graph, names: Iterable[str], *, parameters: bool) -> dict[str, torch.Tensor]:
    """Tensors under the model's names; buffers always, parameters on request."""
    found: dict[str, torch.Tensor] = {}
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
            found[name] = tensor.detach().to("cpu", tensor.dtype if masters else item.dtype)
    return found


def _save_rows(folder: Path, lowered: Lowered, spread: Spread, *, parameters: bool) -> None:
    """A file for each rank of a pipeline: its rows of what is in rows, and what it has whole."""
    n = lowered.size * lowered.tensor
    sizes = dict(zip(spread.tensors, spread.sizes, strict=True))
    names = (*spread.tensors, *held_whole(lowered.graph, spread))
    found = _stored(lowered.graph, names, parameters=parameters)
    for index in range(n):
        own = dict(found)
        for name in found.keys() & sizes.keys():
            span = own_rows(sizes[name], n, index)
            dim = found[name].shape.index(sizes[name])
            own[name] = found[name].narrow(dim, span.start, span.size)
        _save(folder / f"vocabulary_{index}.safetensors", own)


def _save(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors, each with memory of its own."""
    path.parent.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)


def _copy_runtime(path: Path) -> None:
    """The part of parcompiler that rank scripts import, for clusters that have torch only."""
    source = Path(__file__).parent.parent
    target = path / "parcompiler"
    skip = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(source / "runtime", target / "runtime", ignore=skip)
    for name in ("errors.py", "instruction.py", "grid.py", "pieces.py"):
        shutil.copy(source / name, target / name)
    text = '"""The runtime of parcompiler, copied beside the scripts that use it."""\n'
    _write(target / "__init__.py", text)
