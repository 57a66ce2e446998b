"""The notebook, executed as it is written, from an empty folder."""

from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "first_run.ipynb"


def read() -> Any:
    import nbformat

    return nbformat.read(NOTEBOOK, as_version=4)


def test_the_notebook_is_stored_without_outputs() -> None:
    code = [cell for cell in read().cells if cell.cell_type == "code"]
    assert code
    assert [(cell.outputs, cell.execution_count) for cell in code] == [([], None)] * len(code)


@pytest.mark.example
def test_every_cell_of_the_notebook_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbclient import NotebookClient

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = NotebookClient(
        read(), timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = {
        cell.source: "\n".join(str(output.get("data", output.get("text"))) for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    }
    (lines,) = (text for source, text in shown.items() if source.startswith("run = brorl.train("))
    assert "finished 10 steps; run directory: runs/first" in lines
    assert "\x1b" not in lines
    assert "text/html" in shown["run"]
    assert "pass@1" in shown["run"]
    for verb in ("evaluate", "plan"):
        (output,) = (text for source, text in shown.items() if source.startswith(f"brorl.{verb}("))
        assert "text/html" in output
    assert (tmp_path / "runs" / "first" / "report.html").is_file()
