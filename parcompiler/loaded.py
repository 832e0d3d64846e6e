"""An exported folder read back as a program: its plan, instructions, report and workers.

The original model is not needed; the folder's Python files are run, so load only what you trust.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from parcompiler import documents
from parcompiler.data_updates import ALL_REDUCE
from parcompiler.errors import InputError, path_of, shown
from parcompiler.grid import Grid
from parcompiler.instruction import Instructions, parse
from parcompiler.mesh import whole
from parcompiler.plan import Plan
from parcompiler.runtime import TIMEOUT, Worker, loading
from parcompiler.runtime.joining import current_rank
from parcompiler.runtime.program import on_rank

if TYPE_CHECKING:
    from parcompiler.report import Report


@dataclass(frozen=True)
class LoadedProgram:
    """An exported program, as `load` returns it."""

    path: Path
    plan: Plan

    def instructions(self, rank: int) -> Instructions:
        """The training instructions of a rank, printable. Raises InputError for no such rank, and
        for a damaged script.

        They are read, not run: the plan's device need not be here.
        """
        path, grid = self._path(rank), self._grid
        at, updates = grid.coordinate(rank), self.plan.updates or ALL_REDUCE
        with loading(path):
            for statement in ast.parse(path.read_bytes()).body:
                match statement:
                    case ast.Assign([ast.Name("INSTRUCTIONS")], ast.Constant(str(text))):
                        return Instructions(on_rank(parse(text), at, grid, updates))
        message = f"{path} has no INSTRUCTIONS: export the program again"
        raise InputError(message)

    def report(self) -> Report:
        """The report that was made when the program was exported.

        Raises InputError when it is not there or damaged.
        """
        # Here, because a rank that only trains then starts without the passes and their solvers.
        from parcompiler.report import Report

        try:
            return Report.from_json(documents.text_of(self.path / "report.json"), self.plan)
        except InputError as error:
            error.add_note(f"(the report is that of {self.path}: export the program again)")
            raise

    def worker(self, timeout: timedelta | float = TIMEOUT, compiled: bool | None = None) -> Worker:
        """This process's rank, with the exported weights. Call it in processes that torchrun
        started, one per rank. Raises LaunchError when their number is not the plan's, or the ranks'
        folders differ, InputError when a file is missing or damaged.

        A rank that waits longer than `timeout` (a timedelta, or seconds) for others ends with a
        LaunchError that says for which. `compiled` is as for `Program.worker`; None: as exported.
        """
        options = {} if compiled is None else {"compiled": compiled}
        worker: Worker = self._script(current_rank(self._grid.size)).worker(timeout, **options)
        return worker

    @property
    def _grid(self) -> Grid:
        """All ranks."""
        mesh = self.plan.mesh
        return Grid(mesh.pipeline, mesh.replicas, mesh.tensor, mesh.context, mesh.expert)

    def _script(self, rank: int) -> ModuleType:
        """The script of a rank as a module, with the other modules of this folder."""
        path = self._path(rank)
        hidden = {name: sys.modules.pop(name) for name in _modules()}
        sys.path.insert(0, str(self.path))
        try:
            with loading(path):
                script = _module(path)
                script.worker  # noqa: B018 (one that is cut short has none)
                return script
        finally:
            sys.path.remove(str(self.path))
            for name in _modules():
                del sys.modules[name]
            sys.modules.update(hidden)

    def _path(self, rank: int) -> Path:
        """The script of a rank: that of the first one at its pipeline coordinate."""
        index, grid = whole(rank), self._grid
        path = None
        if index is not None and index in range(grid.size):
            path = self.path / f"rank_{index - index % grid.copies}.py"
        if path is None or not path.is_file():
            message = f"{self.path} has no rank {shown(rank)}"
            raise InputError(message)
        return path


def load(path: str | Path) -> LoadedProgram:
    """An exported folder. Raises InputError when it is none, or its plan is damaged."""
    folder = path_of(path)
    plan = folder / "plan.json"
    if not plan.is_file():
        message = f"{folder} is no exported program: it has no plan.json"
        raise InputError(message)
    return LoadedProgram(folder, Plan.from_json(documents.text_of(plan)))


def _modules() -> list[str]:
    """The modules that are loaded under the names of those of exported folders."""
    others = ("vocabulary", "hooks", "counts")
    return [name for name in sys.modules if name.startswith("stage_") or name in others]


def _module(path: Path) -> ModuleType:
    """A file run as a module."""
    spec = importlib.util.spec_from_file_location(f"parcompiler_export_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    importlib.invalidate_caches()
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module
