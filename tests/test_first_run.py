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
    shown = {cell.source: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}

    def cell(start: str) -> list[Any]:
        (outputs,) = (found for source, found in shown.items() if source.startswith(start))
        return [output for output in outputs if output.get("name") != "stderr"]

    def said(start: str) -> list[str]:
        """The lines that a cell printed, and the text of each output that it displayed."""
        texts = [output.get("text") or output.data["text/plain"] for output in cell(start)]
        return [line for text in texts for line in text.splitlines() if line]

    def kinds(start: str) -> list[set[str]]:
        return [set(output.data) for output in cell(start) if "data" in output]

    lines = said("run = brorl.train(")
    assert len(set(lines)) == len(lines)  # each once
    assert lines[0].endswith(": finished 10 steps; run directory: runs/first")  # the line that changed, at its end
    assert any(line.startswith("   10  ") for line in lines)
    assert "\x1b" not in "".join(lines)
    assert kinds("run = brorl.train(") == [{"text/plain"}]
    log = (tmp_path / "runs" / "first" / "run.log").read_text()
    assert all(line in log for line in lines[1:])
    assert "Held-out prompts" in log  # the tables of the result
    assert "Held-out prompts" not in "\n".join(lines)  # which the notebook shows itself
    (result,) = shown["run"]
    assert "Held-out prompts" in result.data["text/html"]
    assert kinds("run.figure()") == [{"text/plain", "image/png"}]
    for verb in ("evaluate", "plan"):
        assert "text/html" in kinds(f"brorl.{verb}(")[-1]
    assert not any("noise of the recipe" in line for line in said("brorl.plan(")[:-1])  # not printed, too
    assert (tmp_path / "runs" / "first" / "report.html").is_file()
