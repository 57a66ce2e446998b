"""The example, run as it is written: from a raw file and a model folder to a checkpoint that transformers loads."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "tutorials" / "own_model_and_data.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.example
def test_every_command_of_the_page_works(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    lines = [line for block in blocks("bash") for line in block.splitlines()]
    assert len(lines) == 4
    for line in lines:
        run(*line.split())
    (python,) = blocks("python")
    assert "\\boxed{" in run(sys.executable, "-c", python)

    records = [json.loads(line) for line in (tmp_path / "runs/words/metrics.jsonl").read_text().splitlines()]
    before, after = (records[i]["evaluation"]["pass_at"]["1"]["value"] for i in (0, -1))
    assert after > before, f"held-out pass@1 went from {before} to {after}"
    rewards = [r["sampling"]["reward"] for r in records[1:]]
    assert sum(rewards[-10:]) > 1.2 * sum(rewards[:10]), f"training rewards: {rewards}"
    assert sum(r["sampling"]["verifier_timeouts"] for r in records[1:]) == 0
    lineage = json.loads((tmp_path / "runs/words-broad/env.json").read_text())["continued_from"]
    assert lineage["rollouts_per_prompt"] == 128
    assert Path(lineage["checkpoint"]).parent == tmp_path / "runs/words/checkpoints"


def test_the_recipe_on_the_page_is_the_recipe() -> None:
    recipe = (ROOT / "examples" / "word_problems" / "recipe.yaml").read_text()
    shown = blocks("yaml")[0]
    without_comments = re.sub(r" {2,}# .*", "", recipe)
    assert shown in without_comments
