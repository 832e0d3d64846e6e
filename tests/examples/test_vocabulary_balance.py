"""examples/vocabulary_balance.py, on models so small that it takes seconds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "vocabulary_balance.py"
SMALL = ("--vocabularies", "512", "65536", "--ranks", "2", "--layers", "2", "--sequence", "16")
WAYS = ("baseline", "redistribute", "vocab-2")


def run(picture: Path, *arguments: str) -> list[list[str]]:
    """The cells of the table that the example prints, from those of numbers of words on."""
    found = subprocess.run(
        [sys.executable, str(EXAMPLE), *SMALL, "--plot", str(picture), *arguments],
        cwd=picture.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    lines = [line for line in found.stdout.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def number(cell: str) -> float:
    return float(cell.rstrip("x").replace(",", ""))


def test_the_ways_stand_side_by_side_and_a_picture_is_drawn(tmp_path: Path) -> None:
    rows = run(tmp_path / "found.png")
    assert [row[0] for row in rows] == ["512"] * 3 + ["65,536"] * 3
    assert [row[1] for row in rows] == [*WAYS, *WAYS]
    large = {row[1]: [number(cell) for cell in row[2:]] for row in rows[3:]}
    seconds, ideal, *memory = zip(*(large[way] for way in WAYS), strict=True)
    assert seconds[2] < seconds[1] <= seconds[0]
    assert min(ideal[:2]) >= 1
    assert max(memory[0][2], memory[1][2]) < max(memory[0][0], memory[1][0])
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.sweep
def test_measured_steps_stand_beside_the_predicted_ones(tmp_path: Path) -> None:
    rows = run(tmp_path / "found.png", "--measure", "512", "--steps", "1")
    assert all(number(row[4]) > 0 for row in rows[:3])
    assert [row[4] for row in rows[3:]] == [""] * len(WAYS)
