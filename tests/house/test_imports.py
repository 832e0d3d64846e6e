"""Imports go one way: the arrows, drawn from the source, are compared with the picture."""

import ast
import graphlib
import itertools
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A room is a module or folder directly under parcompiler. It imports its own layer and those
# below it; within a layer no modules import each other in a circle.
PICTURE = """\
6  compiler flow checks program loaded verification bench cli meshes __main__ __init__
5  lower verifier codegen report request changes prices symbolic
4  passes
3  problem priced options progress calibrate
2  capture cost naming spmd vocabulary schedules timeline solver
1  mesh device efficiency figures graph plan
0  errors instruction grid pieces documents data_updates again ring ctc temporary
"""
LAYER = {
    room: int(layer) for layer, *rooms in map(str.split, PICTURE.splitlines()) for room in rooms
}

# Two rooms stand beside the layers: what of ours each imports, and from which layer up it is used.
ASIDE = {
    "runtime": {
        "runtime",
        "errors",
        "instruction",
        "grid",
        "pieces",
        "data_updates",
        "again",
        "ring",
        "temporary",
    },
    "models": {"models"},
}
LOWEST_USER_OF_ASIDE = 5

# What an exported folder carries to machines that have torch and nothing else; and plain models.
TORCH_ONLY = {
    "errors",
    "instruction",
    "grid",
    "pieces",
    "data_updates",
    "again",
    "ring",
    "ctc",
    "temporary",
    "runtime",
    "models",
}

# The one room that knows a library.
DOORS = {"ortools": "solver"}


@dataclass(frozen=True, slots=True)
class Module:
    """A source file: the name it is imported by, and its path in the repository."""

    name: str
    path: Path

    @property
    def package(self) -> str:
        """What one leading dot means in its imports."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Arrow:
    """One import; ``typing_only`` when it stands under ``if TYPE_CHECKING``."""

    source: Module
    target: str
    line: int
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.source.path}:{self.line}: {self.source.name} -> {self.target}"


def find_faults(root: Path) -> list[str]:
    """A line for each room without a place and each wrong arrow, and the first circle found."""
    modules = {module.name: module for module in find_modules(root)}
    arrows = [
        arrow
        for module in modules.values()
        for arrow in arrows_of(module, (root / module.path).read_bytes(), modules)
    ]
    faults = [*misplaced(modules.values()), *wrong_arrows(arrows), *circles(arrows, modules)]
    return list(dict.fromkeys(faults))


def find_modules(root: Path) -> Iterator[Module]:
    """All modules of the package; those of passes/ and models/ under their installed names."""
    for folder, package in (
        ("parcompiler", "parcompiler"),  # rglob does not follow the two links inside
        ("passes", "parcompiler.passes"),
        ("models", "parcompiler.models"),
    ):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            below = parts[:-1] if parts[-1] == "__init__" else parts
            yield Module(".".join([package, *below]), path.relative_to(root))


def arrows_of(module: Module, source: bytes, names: Collection[str]) -> Iterator[Arrow]:
    """The imports of one file, wherever in it they stand."""

    def visit(node: ast.AST, typing_only: bool) -> Iterator[Arrow]:
        for target in imported_names(node, module, names):
            yield Arrow(module, target, getattr(node, "lineno", 0), typing_only)
        guarded = node.body if isinstance(node, ast.If) and is_type_checking(node.test) else ()
        for child in ast.iter_child_nodes(node):
            yield from visit(child, typing_only or child in guarded)

    return visit(ast.parse(source, str(module.path)), False)


def is_type_checking(test: ast.expr) -> bool:
    """``TYPE_CHECKING`` or ``typing.TYPE_CHECKING``."""
    return "TYPE_CHECKING" in (getattr(test, "id", None), getattr(test, "attr", None))


def imported_names(node: ast.AST, module: Module, names: Collection[str]) -> Iterator[str]:
    """The modules that a statement or call imports (``from a import b`` may mean ``a.b``)."""
    match node:
        case ast.Import():
            yield from (alias.name for alias in node.names)
        case ast.ImportFrom():
            base = absolute(node, module)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield name if name in names else base
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            yield name


def absolute(node: ast.ImportFrom, module: Module) -> str:
    """The module that ``from ..x import`` names."""
    if node.level == 0:
        return node.module or ""
    parts = module.package.split(".")
    return ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])


def room_of(name: str) -> str:
    """The part under parcompiler that a module belongs to."""
    return [*name.split("."), "__init__"][1]


def misplaced(modules: Iterable[Module]) -> Iterator[str]:
    """Rooms that the picture does not show."""
    for module in modules:
        room = room_of(module.name)
        if room not in LAYER and room not in ASIDE:
            yield f"{module.path}: room {room!r} is not in the picture: give it a layer"


def wrong_arrows(arrows: Iterable[Arrow]) -> Iterator[str]:
    """Arrows that break a rule, each with the rule."""
    for arrow in arrows:
        ours = arrow.target.split(".")[0] == "parcompiler"
        broken = broken_inside(arrow) if ours else broken_outside(arrow)
        if broken:
            yield f"{arrow} ({broken})"


def broken_inside(arrow: Arrow) -> str | None:
    """The rule among our own rooms that an arrow breaks."""
    source, target = room_of(arrow.source.name), room_of(arrow.target)
    if source in ASIDE:
        allowed = ASIDE[source]
        return None if target in allowed else f"{source} imports only {', '.join(sorted(allowed))}"
    layer = LAYER.get(source, 0)
    if target in ASIDE:
        allow = layer >= LOWEST_USER_OF_ASIDE
        return None if allow else f"layer {layer} imports {target}, for the two upper layers"
    above = LAYER.get(target, 0)
    return f"layer {layer} imports layer {above}" if above > layer else None


def broken_outside(arrow: Arrow) -> str | None:
    """The rule about libraries that an arrow breaks."""
    room, library = room_of(arrow.source.name), arrow.target.split(".")[0]
    if library in ("passes", "models"):
        return f"its name is parcompiler.{library}"
    if room in TORCH_ONLY and library not in {*sys.stdlib_module_names, "torch"}:
        return f"{room} imports torch and the standard library only"
    if DOORS.get(library, room) != room:
        return f"{DOORS[library]} is the one door to {library}"
    return None


def circles(arrows: Iterable[Arrow], modules: Collection[str]) -> Iterator[str]:
    """A circle of imports at run time, as the arrows that close it."""
    edges = {
        (arrow.source.name, arrow.target): arrow
        for arrow in arrows
        if arrow.target in modules and not arrow.typing_only
    }
    sorter = graphlib.TopologicalSorter[str]()
    for source, target in edges:
        sorter.add(source, target)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        circle = reversed(error.args[1])  # graphlib lists the imported before the importer
        steps = [str(edges[step]) for step in itertools.pairwise(circle)]
        yield "\n  ".join(["a circle of imports:", *steps])


def test_imports_go_one_way() -> None:
    faults = find_faults(ROOT)
    listed = "\n".join(faults)
    assert not faults, (
        f"wrong imports:\n{listed}\n\nthe layers, each importing downwards:\n{PICTURE}"
    )


def printed(script: str) -> list[str]:
    """The lines that a process of its own prints."""
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return run.stdout.splitlines()


def test_the_runtime_loads_nothing_of_the_planning_half() -> None:
    """A rank of a loaded program, and one that proves, load a little more, and no solver."""
    script = "import parcompiler.runtime, sys; print(*sys.modules)"
    script += (
        "; import parcompiler.loaded, parcompiler.verification.rank_process; print(*sys.modules)"
    )
    compiler = "import parcompiler as pc, sys; pc.compile; print(*sys.modules)"
    compiler += "; import parcompiler.flow; print(*sys.modules)"
    loaded, more, named, compiling = (
        set(line.split()) for line in printed(script) + printed(compiler)
    )
    assert not {"ortools", "safetensors", "transformers", "parcompiler.passes"} & loaded
    ours = {room_of(name) for name in loaded if name.split(".")[0] == "parcompiler"}
    assert ours <= {"__init__", *ASIDE["runtime"]}
    assert not {"ortools", "plotly", "transformers", "parcompiler.passes"} & more
    dear = {"ortools", "pandas", "plotly", "sympy", "torch._dynamo", "rich", "jinja2"}
    later = {f"parcompiler.{room}" for room in ("codegen", "report", "runtime", "verification")}
    assert not {"parcompiler.capture", "parcompiler.passes", "parcompiler.verifier"} & named
    assert "parcompiler.passes" in compiling
    assert not (dear | later) & compiling  # who needs them pays for them


def test_passes_and_models_are_seen() -> None:
    names = {module.name for module in find_modules(ROOT)}
    assert {"parcompiler", "parcompiler.passes", "parcompiler.models"} <= names


@pytest.mark.parametrize(
    ("path", "source", "fault"),
    [
        ("parcompiler/plan.py", "import parcompiler.cost", "layer 1 imports layer 2"),
        ("parcompiler/cost/a.py", "from parcompiler import Mesh", "layer 2 imports layer 6"),
        ("parcompiler/cost/a.py", "from ..passes import stage", "layer 2 imports layer 4"),
        ("parcompiler/cost/__init__.py", "from ..cli import main", "layer 2 imports layer 6"),
        ("passes/a.py", "def f():\n    from parcompiler.lower import b", "passes/a.py:2: "),
        ("passes/a.py", "if TYPE_CHECKING:\n    import parcompiler.cli", "layer 4 imports layer 6"),
        ("passes/a.py", "importlib.import_module('parcompiler.cli')", "layer 4 imports layer 6"),
        ("parcompiler/runtime/a.py", "from parcompiler.plan import Plan", "runtime imports only"),
        ("parcompiler/runtime/a.py", "import safetensors.torch", "torch and the standard library"),
        ("parcompiler/errors.py", "import sympy", "torch and the standard library"),
        ("models/gpt/a.py", "import numpy", "torch and the standard library"),
        ("models/gpt/a.py", "from parcompiler.mesh import Mesh", "models imports only models"),
        ("parcompiler/cost/a.py", "import parcompiler.runtime", "for the two upper layers"),
        ("passes/a.py", "from ortools.sat import cp_model", "solver is the one door to ortools"),
        ("passes/a.py", "import passes.b", "its name is parcompiler.passes"),
        ("parcompiler/helpers.py", "", "room 'helpers' is not in the picture"),
    ],
)
def test_a_wrong_import_is_found(path: str, source: str, fault: str, tmp_path: Path) -> None:
    assert fault in "\n".join(find_faults(write(tmp_path, {path: source})))


def test_a_circle_is_found_with_its_arrows(tmp_path: Path) -> None:
    (fault,) = find_faults(
        write(
            tmp_path,
            {
                "passes/__init__.py": "from parcompiler.passes.a import A",
                "passes/a.py": "from parcompiler.passes import b",
                "passes/b.py": "\nfrom parcompiler.passes import DEFAULT",
            },
        )
    )
    assert "a circle of imports" in fault
    assert "passes/__init__.py:1: parcompiler.passes -> parcompiler.passes.a" in fault
    assert "passes/a.py:1: parcompiler.passes.a -> parcompiler.passes.b" in fault
    assert "passes/b.py:2: parcompiler.passes.b -> parcompiler.passes" in fault


def test_right_imports_pass(tmp_path: Path) -> None:
    files = {
        "parcompiler/__init__.py": "if TYPE_CHECKING:\n    import parcompiler.compiler",
        "parcompiler/compiler.py": "from parcompiler import mesh, passes, runtime",
        "parcompiler/mesh.py": "if TYPE_CHECKING:\n    from parcompiler.graph import Graph",
        "parcompiler/graph.py": "from __future__ import annotations\nfrom .mesh import Mesh",
        "parcompiler/solver.py": "from ortools.linear_solver import pywraplp",
        "parcompiler/instruction.py": "import enum",
        "parcompiler/runtime/a.py": "import torch.distributed\nfrom .. import instruction",
        "passes/__init__.py": "from parcompiler.passes.a import A",
        "passes/a.py": "from parcompiler.solver import solve\nfrom parcompiler.passes.b import B",
        "passes/b.py": "",
        "models/gpt/model.py": "import torch\nfrom parcompiler.models.gpt import configs",
        "models/gpt/configs.py": "import math",
    }
    assert find_faults(write(tmp_path, files)) == []


def write(root: Path, files: Mapping[str, str]) -> Path:
    for relative, source in files.items():
        path = root / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


def test_a_class_name_stands_for_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for module in find_modules(ROOT):
        for node in ast.walk(ast.parse((ROOT / module.path).read_bytes())):
            if isinstance(node, ast.ClassDef) and ".models" not in module.name:
                places.setdefault(node.name, []).append(f"{module.name}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
