"""examples/notebook.ipynb, run in a Jupyter kernel."""

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from folders import ROOT

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
SECONDS = 300  # of a cell, on a loaded machine


@pytest.mark.slow
def test_the_notebook_trains_loses_two_workers_and_loads_the_weights_back(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "IPYTHONDIR": str(tmp_path / "ipython")}
    NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}}).execute(env=environment)
    said = [text_of(cell) for cell in notebook.cells if cell.cell_type == "code"]
    assert any("task: 5 layers" in text for text in said)
    assert any("! WorkerLost: " in text and "digits: Complete, step 120/120" in text for text in said)
    (shown,) = [html for cell in notebook.cells for html in htmls_of(cell)]
    assert "<polyline" in shown
    assert any("120 steps, loss 2." in text and "workers lost: 2" in text for text in said)
    assert any("% right" in text for text in said)
    assert said[-1] == "bit-equal: yes\n"
    assert (tmp_path / "digits.safetensors").is_file()


def text_of(cell: Any) -> str:
    return "".join(out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stdout")


def htmls_of(cell: Any) -> list[str]:
    outputs = cell.get("outputs", ())
    return [out.data["text/html"] for out in outputs if "text/html" in out.get("data", {})]
