"""What every test shares: one thread per process, and golden files."""

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"

collect_ignore = ["golden"]  # emitted scripts: they are compared and linted, not imported


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the files of tests/golden instead of comparing with them",
    )


def pytest_configure() -> None:
    # Sums keep their order, and worker processes do not fight for cores.
    torch.set_num_threads(1)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(relative_path, text)``: the golden file holds exactly this text."""
    update = bool(request.config.getoption("--update-golden"))

    def check(relative_path: str, text: str) -> None:
        path = GOLDEN / relative_path
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
            return
        advice = "make golden rewrites it; read the diff before you commit"
        if not path.is_file():
            pytest.fail(f"golden file {relative_path} does not exist ({advice})", pytrace=False)
        expected = path.read_bytes().decode()
        if text != expected:
            diff = unified_diff(expected, text)
            pytest.fail(f"golden file {relative_path} differs ({advice})\n{diff}", pytrace=False)

    return check


def unified_diff(expected: str, text: str) -> str:
    lines = difflib.unified_diff(
        expected.splitlines(keepends=True), text.splitlines(keepends=True), "golden", "this run"
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ no newline at end of file\n" for line in lines
    )
