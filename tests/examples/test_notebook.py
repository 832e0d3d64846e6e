"""The notebook runs from its first cell to its last, and is kept without outputs."""

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "pipeline.ipynb"


def cells() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_the_notebook_is_kept_without_outputs() -> None:
    notebook = cells()
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_the_notebook_shows_a_report_and_proves_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    notebook = cells()
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    shown = [output.data for output in outputs if output.output_type == "execute_result"]
    assert "verified: ok" in printed
    assert "stage 0 on rank 0: " in printed
    assert any("text/html" in data for data in shown)
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
