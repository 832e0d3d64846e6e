"""benchmarks/vocabulary_paper: published measurements that the cost model must keep to."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "vocabulary_paper"


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A file of the benchmark, under its own name as long as the test takes."""
    spec = spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Any:
    return loaded("paper", monkeypatch)


@pytest.fixture
def run(paper: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    return loaded("run", monkeypatch)


def test_the_published_step_has_the_published_mfu(paper: Any) -> None:
    cell = next(c for c in paper.published() if (c.method, c.thousands) == ("Vocab-1", 256))
    assert cell.mfu == 50.12
    assert paper.mfu(cell, 5.9003) == pytest.approx(cell.mfu, abs=0.02)
    assert len(list(paper.published())) == 40


def test_the_largest_vocabulary_is_predicted_whole_and_on_all_ranks(paper: Any, run: Any) -> None:
    cells = [c for c in paper.published() if (c.sequence, c.thousands) == (2048, 256)]
    rows = run.predicted(c for c in cells if c.method in ("Baseline", "Vocab-1"))
    assert [row.cell.method for row in rows] == ["Baseline", "Vocab-1"]
    assert all(abs(row.points) <= 2 for row in rows), run.table(rows)
    assert all(abs(row.share) <= 0.06 for row in rows), run.table(rows)
    assert run.misordered(rows) == []
    assert "| 2048 | 256k | Vocab-1 | 50.12 % |" in run.table(rows)


@pytest.mark.sweep
def test_the_whole_table_is_within_its_errors(paper: Any, run: Any) -> None:
    rows = run.predicted(paper.published())
    points = [abs(row.points) for row in rows]
    assert sum(points) / len(points) <= 1.5, run.summary(rows)
    assert max(points) <= 4, run.summary(rows)
    assert sum(abs(row.share) for row in rows) / len(rows) <= 0.06, run.summary(rows)
    assert run.misordered(rows) == []
