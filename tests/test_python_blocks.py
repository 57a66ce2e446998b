"""The Python of README.md and of docs/how-to/python.md, run from an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = """
import linecache

for number, cell in enumerate(CELLS):
    name = f"/tmp/ipykernel_1/{number}.py"  # as IPython runs it: the text is known to linecache alone
    linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
    exec(compile(cell, name, "exec"))
"""
FEWER = {
    "steps=20": "steps=2",
    'match="seconds"': 'match="steps"',
    "budget=30": "budget=2, marks=1",
    "seeds=3": "seeds=2",
}


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)


def printed_by(program: str, folder: Path) -> str:
    (folder / "script.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_the_examples_of_the_page_work(tmp_path: Path) -> None:
    """As cells of a notebook."""
    page = "docs/how-to/python.md"
    calls = re.findall(r"^\| `(brorl\.[^`]*)` \|", (ROOT / page).read_text("utf-8"), re.MULTILINE)
    assert (len(blocks(page)), len(calls)) == (5, 7)
    shown = [  # files that the page only names; `tune` takes half an hour and has tests of its own
        call.replace(', "runs/other"', "").replace("responses.jsonl", "runs/first-evaluation")
        for call in calls
        if not call.startswith("brorl.tune")
    ]
    cells = [*blocks(page), *(f"print(repr({call}))" for call in shown)]
    printed = printed_by(f"CELLS = {cells!r}\n{NOTEBOOK}", tmp_path)
    assert "held-out pass@1:" in printed
    assert "difference in pass@1:" in printed
    for name in ("DataResult", "CheckResult", "SampledTree", "Samples", "Report", "VerifyResult"):
        assert re.search(rf"^{name}\(", printed, re.MULTILINE), name


@pytest.mark.example
def test_the_python_block_of_the_readme_works(tmp_path: Path) -> None:
    """With fewer steps and seeds."""
    (block,) = blocks("README.md")
    for number, fewer in FEWER.items():
        assert block.count(number) == 1
        block = block.replace(number, fewer)
    assert "4/4" in printed_by(block, tmp_path)  # two arms with two seeds
    assert (tmp_path / "runs" / "plan" / "plan.json").is_file()
    (comparison,) = tmp_path.glob("runs/compare-*/comparison.json")
    assert '"N=512"' in comparison.read_text()
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()
