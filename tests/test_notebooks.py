"""The tutorials run as they are, from a folder of their own, and are kept with their outputs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
LONG = {"distilling_a_deep_ensemble", "llama_as_classifier", "serving_it"}
MARKED = [
    pytest.param(path, marks=[pytest.mark.slow] if path.stem in LONG else []) for path in NOTEBOOKS
]
NEEDS = {"serving_it": ("starlette", "uvicorn", "onnxruntime", "onnxscript")}


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", MARKED, ids=lambda value: value.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    for package in NEEDS.get(path.stem, ()):
        pytest.importorskip(package)
    notebook = read(path)
    where = {"metadata": {"path": str(tmp_path)}}
    # a cell that raises stops it here
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_its_outputs(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert sum(bool(cell.outputs) for cell in code) >= len(code) // 2
    assert all(cell.execution_count for cell in code)
    errors = [out for cell in code for out in cell.outputs if out.output_type == "error"]
    assert not errors
    # no folder of the machine that ran it
    assert not re.search(r"/(tmp|home|root|opt|work|Users)/", path.read_text(encoding="utf-8"))


def test_all_tutorials_are_listed() -> None:
    page = (ROOT / "docs" / "tutorials" / "index.md").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) >= 4
    for path in NOTEBOOKS:
        assert f"({path.name})" in page
