"""The notebook of the examples runs from its first cell to its last, and shows its pictures."""

from __future__ import annotations

import ast
import base64
import io
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from PIL import Image
from traitlets.config import Config

from tests.harness.errors import assert_names

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK, OWN_PLUGINS = EXAMPLES / "notebook.ipynb", EXAMPLES / "own-plugins.ipynb"
CELL_S = 300
# A cell of ours, after those of the notebook.
KEPT = '[run.predictions[name] for name in ("split", "score_1", "truth")]'


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(notebook: Any) -> list[np.ndarray[Any, Any]]:
    """The pictures that the cells show, as grey pixels."""
    found = [
        output["data"]["image/png"]
        for cell in code(notebook)
        for output in cell.outputs
        if "data" in output and "image/png" in output["data"]
    ]
    return [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(text))).convert("L")) for text in found
    ]


def execute(path: Path, folder: Path, more: str = "") -> Any:
    """Runs a notebook in an empty folder, with ``more`` as its last cell; returns it with what its
    cells show.
    """
    notebook = nbformat.read(path, 4)
    if more:
        notebook.cells.append(nbformat.v4.new_code_cell(more))
    for cell in code(notebook):
        cell.outputs, cell.execution_count = [], None
    # Needs no free ports.
    ipc = Config({"KernelManager": {"transport": "ipc", "ip": str(folder / "k")}})
    NotebookClient(
        notebook,
        config=ipc,
        kernel_name="python3",
        timeout=CELL_S,
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    return notebook


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return execute(NOTEBOOK, tmp_path_factory.mktemp("n"))


def test_what_is_written_in_cells_gives_the_same_numbers_over_processes(tmp_path: Path) -> None:
    """A metric, a loss, a transform and a method; each is used, and the method learns."""
    found = code(execute(OWN_PLUGINS, tmp_path, more=KEPT))

    def shown(cell: Any) -> str:
        return str(cell.outputs[-1]["data"]["text/plain"])

    *_, ran, refused, _written, again, kept = found
    metrics = ast.literal_eval(shown(ran))
    assert metrics["auc"] > 0.9
    assert 0.0 < metrics["quadratic"] < 0.2
    split, p, truth = map(np.array, ast.literal_eval(shown(kept)))
    margins = (np.log(p / (1 - p)) * (2 * truth - 1))[split == "test"]
    assert metrics["loss"] == pytest.approx(np.maximum(0, 1 - margins).mean(), rel=1e-6)
    assert_names(refused.outputs[0]["text"], "processes")
    assert shown(again) == "True"
    assert (tmp_path / "mine.py").is_file()


def test_the_notebook_runs_and_its_last_cells_are_right(executed: Any) -> None:
    *_, chosen, last = code(executed)
    assert chosen.outputs[0]["data"]["text/plain"].startswith("'lr = 0.001: test AUC 0.9")
    said = next(output["text"] for output in last.outputs if output.output_type == "stream")
    assert float(said.split("%")[0]) > 90.0
    table = next(
        output["data"]["text/html"]
        for output in last.outputs
        if output.output_type == "execute_result"
    )
    assert "<th>diagnosis</th>" in table


def test_the_notebook_shows_a_table_progress_and_two_pictures(executed: Any) -> None:
    shown = next(cell for cell in code(executed) if cell.source.endswith("\nrun"))
    texts = [output["data"]["text/plain"] for output in shown.outputs]
    assert any("round 25/25" in text for text in texts)
    # The run, once.
    assert sum("-diagnosis-" in text for text in texts) == 1
    assert "<pre" in shown.outputs[-1]["data"]["text/html"]
    curves, rates = pictures(executed)
    for picture in (curves, rates):
        assert picture.shape[0] > 300
        # Lines and words, on white.
        assert 0.005 < (picture < 128).mean() < 0.5


def test_the_notebook_is_kept_with_what_it_showed() -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in code(notebook)] == list(
        range(1, len(code(notebook)) + 1)
    )
    assert len(pictures(notebook)) == 2
    assert not any(
        output.output_type == "error" for cell in code(notebook) for output in cell.outputs
    )
