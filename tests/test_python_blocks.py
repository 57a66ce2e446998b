"""The examples of docs/how-to/python.md, run as cells of a notebook, from an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "python.md"

NOTEBOOK = """
import linecache

for number, cell in enumerate(CELLS):
    name = f"/tmp/ipykernel_1/{number}.py"  # as IPython runs it: the text is known to linecache alone
    linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
    exec(compile(cell, name, "exec"))
"""


@pytest.mark.slow
def test_the_examples_of_the_page_work(tmp_path: Path) -> None:
    text = PAGE.read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    calls = re.findall(r"^\| `(brorl\.[^`]*)` \|", text, re.MULTILINE)
    assert len(blocks) == 5
    assert len(calls) == 7
    shown = [  # files that the page only names; `tune` takes half an hour and has tests of its own
        call.replace(', "runs/other"', "").replace("responses.jsonl", "runs/first-evaluation")
        for call in calls
        if not call.startswith("brorl.tune")
    ]
    cells = [*blocks, *(f"print(repr({call}))" for call in shown)]
    (tmp_path / "script.py").write_text(f"CELLS = {cells!r}\n{NOTEBOOK}")
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "held-out pass@1:" in done.stdout
    assert "difference in pass@1:" in done.stdout
    for name in ("DataResult", "CheckResult", "SampledTree", "Samples", "Report", "VerifyResult"):
        assert re.search(rf"^{name}\(", done.stdout, re.MULTILINE), name
