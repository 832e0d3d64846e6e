"""Emitted modules as classes of this process, without a folder."""

from __future__ import annotations

import linecache
from types import ModuleType
from typing import Any

from parcompiler.codegen.functions import counts_module, hooks_module
from parcompiler.codegen.stage import StageWriter
from parcompiler.codegen.vocabulary import vocabulary_module
from parcompiler.lower.lowered import Lowered
from parcompiler.runtime import Stage, Vocabulary


def stage_classes(lowered: Lowered, rank: int, device: str) -> dict[int, type[Stage]]:
    """The stage classes of a rank by stage index: the text that `export` writes, imported."""
    classes = {}
    for stage in lowered.on_rank(rank):
        text = StageWriter(lowered, stage, device).text()
        classes[stage.index] = _import(text, f"stage_{stage.index}", f"Stage{stage.index}")
    return classes


def vocabulary_class(lowered: Lowered, device: str) -> type[Vocabulary] | None:
    """The class of the layers on all ranks, if there are any."""
    if lowered.vocabulary is None:
        return None
    made: type[Vocabulary] = _import(vocabulary_module(lowered, device), "vocabulary", "Vocabulary")
    return made


def functions(lowered: Lowered, device: str) -> dict[str, Any]:
    """Optional keyword arguments of a worker: `hooks` on gradients, by parameter name, and
    `counted`, which counts the targets that the loss is a mean over."""
    made: dict[str, Any] = {}
    if lowered.graph.hooks:
        made["hooks"] = _import(hooks_module(lowered.graph, device), "hooks", "HOOKS")
    if lowered.graph.counts is not None:
        made["counted"] = _import(counts_module(lowered, device), "counts", "counted")
    return made


def _import(text: str, module_name: str, kind: str) -> Any:
    """Run a text as a module and return its attribute `kind`; tracebacks show its lines."""
    name = f"<parcompiler {module_name}.py>"
    module = ModuleType(module_name)
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), module.__dict__)
    return getattr(module, kind)
