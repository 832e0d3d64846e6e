"""What every test shares: one thread per process, and golden files."""

import difflib
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

GOLDEN = Path(__file__).parent / "golden"
STARTING_RANKS = {  # by group: those that start processes of their own, and those of the pool
    "started": (
        "tests/distributed/test_checkpoints.py",
        "tests/distributed/test_export.py",
        "tests/distributed/test_failures.py",
        "tests/distributed/test_kills.py",
        "tests/distributed/test_pretrained.py",
        "tests/distributed/test_starting.py",
        "tests/distributed/test_training.py",
        "tests/distributed/test_vocabulary_failures.py",
        "tests/distributed/test_vocabulary_use.py",
        "tests/examples/",
        "tests/random_models/",
        "tests/runtime/test_tensor.py",
        "tests/runtime/test_vocabulary_ranks.py",
    ),
    "pool": ("tests/distributed/",),
}

# A machine that is busy or slow is no fault of what is tested.
settings.register_profile("slow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slow")

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
    # Collections of garbage that found next to nothing took a fifth of the tests' CPU time.
    gc.set_threshold(20_000, 20, 50)


def pytest_collection_finish() -> None:
    gc.freeze()  # modules of torch and of tests stay: no collection looks at them again


class Sharing(LoadScopeScheduling):  # type: ignore[misc]
    """What workers of pytest-xdist share out: files, but what starts ranks goes to two, so that the
    suite has one pool of processes, and not more of them at once than it means to."""

    def _split_scope(self, nodeid: str) -> str:
        """What stays together with a test."""
        path = nodeid.split("::", 1)[0]
        groups = (name for name, paths in STARTING_RANKS.items() if path.startswith(paths))
        return next(groups, path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Sharing:
    """The scheduler of --dist."""
    return Sharing(config, log)


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
