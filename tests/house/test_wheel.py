"""The wheel installs parcompiler and nothing else, with passes/ and models/ in their places."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
PLACES = {
    "parcompiler": "parcompiler",
    "passes": "parcompiler/passes",
    "models": "parcompiler/models",
}


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> set[PurePosixPath]:
    """The files of a wheel built from a copy of the sources, so that no build/ stays behind."""
    source = tmp_path_factory.mktemp("source")
    for folder in PLACES:
        shutil.copytree(
            ROOT / folder,
            source / folder,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    (source / "docs").mkdir()
    for name in ("pyproject.toml", "docs/package.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(source)]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.returncode == 0, run.stdout
    (wheel,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(map(PurePosixPath, archive.namelist()))


def test_the_top_level_is_parcompiler_alone(contents: set[PurePosixPath]) -> None:
    top = {path.parts[0] for path in contents}
    assert {name for name in top if not name.endswith(".dist-info")} == {"parcompiler"}
    assert len(top) == 2


def test_every_module_is_in_its_place_and_nothing_else_is(contents: set[PurePosixPath]) -> None:
    installed = {path for path in contents if path.parts[0] == "parcompiler"}
    expected = {
        PurePosixPath(place) / path.relative_to(ROOT / folder).as_posix()
        for folder, place in PLACES.items()
        for pattern in ("*.py", "*.jinja", "devices/*.json", "py.typed")
        for path in (ROOT / folder).rglob(pattern)
    }
    assert installed == expected


def test_the_page_of_the_package_index_has_no_links_into_the_repository() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "](" not in (ROOT / project["readme"]).read_text()


def test_the_packages_of_pyproject_are_the_folders() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = sorted(
        ".".join([*PurePosixPath(place).parts, *path.parent.relative_to(ROOT / folder).parts])
        for folder, place in PLACES.items()
        for path in (ROOT / folder).rglob("__init__.py")
    )
    lines = "".join(f'    "{name}",\n' for name in folders)
    assert setuptools["packages"] == folders, f"the list should be:\npackages = [\n{lines}]"


@pytest.mark.parametrize("folder", ["passes", "models"])
def test_the_source_tree_links_to_the_folders(folder: str) -> None:
    link = ROOT / "parcompiler" / folder
    assert link.is_symlink(), f"parcompiler/{folder} is no link (git config core.symlinks true)"
    assert link.readlink() == Path("..", folder)
