"""Cheap mistakes are found before torch is imported, which takes seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from brorl.config.reading import make_config, read_recipe
from brorl.errors import UserError
from brorl.evaluation.questions import build_questions, check_first_rows

_PROGRAM = """
import json, sys
from brorl.cli import main
for arguments in json.loads(sys.argv[1]):
    print(main(arguments), "torch" in sys.modules, "transformers" in sys.modules, file=sys.stderr)
"""
MISTAKES = {
    "train nofile.yaml": "recipe 'nofile.yaml' is neither a file nor a built-in recipe",
    "train --stepz=3": "stepz is not a setting; did you mean steps?",
    "train --output_dir=used": "output_dir used exists and is not empty",
    "train --output_dir=rows.jsonl": "output_dir rows.jsonl exists and is not empty",
    "train --data.sources=[none.jsonl]": "there is no file or folder none.jsonl",
    "train --data.sources=[rows.jsonl]": "rows.jsonl line 1 has no column 'prompt' (columns: question, answer)",
    "train --data.sources=[{path:~rows.jsonl,~layout:~ifeval}]": "is not in the layout ifeval: it has no",
    "train --evaluation.sources=[none.jsonl]": "there is no file or folder none.jsonl",
    "train --model=./none": "model folder ./none does not exist",
    "train --verification.functions={own:~none.py:check}": "verification.functions.own: there is no file none.py",
    "check --output_dir=used": "output_dir used exists and is not empty",
    "check --data.sources=[rows.jsonl]": "rows.jsonl line 1 has no column 'prompt'",
    "data --data.sources=[rows.jsonl]": "rows.jsonl line 1 has no column 'prompt'",
    "eval ./none": "model folder ./none does not exist",
    "init none.jsonl": "there is no file or folder none.jsonl",
    "init rows.jsonl --answer-column=x": "has no column 'x'",
    "resume none": "none is not a run directory",
}


@pytest.mark.slow
def test_they_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    (tmp_path / "used/x").mkdir(parents=True)
    commands = [[part.replace("~", " ") for part in mistake.split()] for mistake in MISTAKES]
    arguments = [sys.executable, "-c", _PROGRAM, json.dumps(commands)]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    lines = [line for line in done.stderr.splitlines() if line != "brorl 0.1.0: starting"]
    for (mistake, said), error, outcome in zip(MISTAKES.items(), lines[::2], lines[1::2], strict=True):
        assert said in error, mistake
        assert outcome == "2 False False", mistake
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "used"]


def test_a_row_that_a_layout_drops_is_no_mistake(tmp_path: Path) -> None:
    row = {"prompt": "Hi", "instruction_id_list": ["new:kind"], "kwargs": [{}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    source = {"path": str(tmp_path / "rows.jsonl"), "layout": "ifeval"}
    check_first_rows(make_config(read_recipe("quickstart"), {"data.sources": [source, {"path": "owner/hub"}]}, "x"))
    config = make_config(read_recipe("quickstart"), {"data.sources": [source]}, "x")
    with pytest.raises(UserError, match="the layout ifeval dropped all 1 rows"):
        build_questions(config)
