"""The Python block of README.md, run from an empty folder with fewer steps and seeds."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
FEWER = {
    "steps=20": "steps=2",
    'match="seconds"': 'match="steps"',
    "budget=30": "budget=2, marks=1",
    "seeds=3": "seeds=2",
}


@pytest.mark.example
def test_the_python_block_of_the_readme_works(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    for printed, fewer in FEWER.items():
        assert block.count(printed) == 1
        block = block.replace(printed, fewer)
    (tmp_path / "script.py").write_text(block)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "4/4" in done.stdout  # two arms with two seeds
    assert (tmp_path / "runs" / "plan" / "plan.json").is_file()
    (comparison,) = tmp_path.glob("runs/compare-*/comparison.json")
    assert '"N=512"' in comparison.read_text()
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()
