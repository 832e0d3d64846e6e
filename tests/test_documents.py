"""Text files are written whole, or not at all."""

import resource
import stat
from pathlib import Path

import pytest

from parcompiler import documents


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    documents.write(path, "old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            documents.write(path, "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_replaced_keeps_its_mode_and_the_links_to_it(tmp_path: Path) -> None:
    path, link = tmp_path / "plan.json", tmp_path / "link.json"
    documents.write(path, "old")
    path.chmod(0o600)
    link.symlink_to(path.name)
    documents.write(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_no_file_is_written_to() -> None:
    documents.write("/dev/null", "text")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
