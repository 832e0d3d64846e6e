"""Text files are written whole, or not at all."""

import os
import resource
import stat
from pathlib import Path

import pytest

import parcompiler as pc
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


def test_a_pipe_with_a_name_is_refused_where_a_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.json")
    with pytest.raises(pc.InputError, match=r"plan.json is a named pipe: put the file itself in"):
        documents.text_of(tmp_path / "plan.json")
    read, write = os.pipe()  # as of <(command) in a shell
    with os.fdopen(read), os.fdopen(write, "w") as file:
        file.write("text")
        file.close()
        assert documents.text_of(f"/dev/fd/{read}") == "text"


def test_what_is_no_file_is_written_to() -> None:
    documents.write("/dev/null", "text")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
