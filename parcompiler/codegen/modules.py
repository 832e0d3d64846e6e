"""Emitted stage modules as classes of this process, without a folder."""

from __future__ import annotations

import linecache
from types import ModuleType

from parcompiler.codegen.stage import StageWriter
from parcompiler.lower.lowered import Lowered
from parcompiler.runtime import Stage


def stage_classes(lowered: Lowered, rank: int, device: str) -> dict[int, type[Stage]]:
    """The stage classes of a rank by stage index: the text that `export` writes, imported."""
    found = {}
    for stage in lowered.on_rank(rank):
        text = StageWriter(lowered, stage, device).text()
        found[stage.index] = _import(text, stage.index)
    return found


def _import(text: str, index: int) -> type[Stage]:
    """Run the text as a module; tracebacks show its lines."""
    name = f"<parcompiler stage_{index}.py>"
    module = ModuleType(f"stage_{index}")
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), module.__dict__)
    made: type[Stage] = getattr(module, f"Stage{index}")
    return made
