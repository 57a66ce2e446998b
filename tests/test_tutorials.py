"""The commands and the Python of the tutorials, run in their order with fewer steps, prompts and samples."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from brorl.config.reading import parse_yaml, read_recipe
from child_runs import ChildRuns

ROOT = Path(__file__).parents[1]
FEW_SAMPLES = (
    "--evaluation.num_prompts 8 --evaluation.rollouts_per_prompt 16 --evaluation.ks [1,16] "
    "--dynamic_sampling.enabled false"
)
FEW = {
    "train": f"--steps 2 --prompts_per_step 4 {FEW_SAMPLES}",
    "eval": "--samples 16 --evaluation.num_prompts 8",
    "plan": "--pilot-prompts 8 --pilot-rollouts 16",
    "compare": f"--match steps --budget 2 --eval-points 1 --seeds 1 {FEW_SAMPLES}",
    "examples/word_problems/make_model.py": "--steps 60",
}
NEED_THE_HUB = (  # their model is not on this machine
    "brorl train prorl ", "brorl train brorl ", "brorl init questions.jsonl ", "brorl check mine.yaml",
    "brorl train mine.yaml",
)  # fmt: skip


def blocks(page: str, language: str) -> str:
    text = (ROOT / "docs" / "tutorials" / f"{page}.md").read_text("utf-8")
    return "\n".join(re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL))


def commands(page: str) -> list[str]:
    """Return the commands of a page without their comments, in order."""
    lines = blocks(page, "bash").replace("\\\n", " ").splitlines()
    found = [line.partition(" #")[0].strip() for line in lines if line.startswith(("brorl ", "python "))]
    return [line for line in found if not line.startswith(NEED_THE_HUB)]


@pytest.mark.example
@pytest.mark.parametrize(
    "page", ["calculator", "first_run", "from_a_plateau", "long_run", "own_model_and_data", "read_a_comparison"]
)
def test_the_commands_of_a_tutorial_work(page: str, tmp_path: Path) -> None:
    for example in ("calculator", "word_problems"):
        shutil.copytree(ROOT / "examples" / example, tmp_path / "examples" / example)
    child = ChildRuns(tmp_path)

    def run(line: str) -> str:
        words = shlex.split(line)
        if words[0] == "python":
            done = subprocess.run(
                [sys.executable, *words[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=600
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
            return done.stdout
        expanded = [found for word in words[1:] for found in ([*tmp_path.glob(word)] if "*" in word else ()) or [word]]
        outcome = child(*expanded)
        assert outcome.code == 0, f"{line}\n{outcome}"
        return outcome.out

    if page == "first_run":  # the README's line, which the gate runs as it is
        run(f"brorl train {FEW['train']}")
    if page == "read_a_comparison":  # what its reader has
        run(f"brorl train plateau-16 --output_dir runs/plateau {FEW['train']}")
        for name in ("A", "B", "mine"):
            shutil.copy(
                ROOT / "src/brorl/recipes" / f"plateau-{512 if name == 'B' else 16}.yaml", tmp_path / f"{name}.yaml"
            )
    lines = commands(page)
    assert lines
    for line in lines:
        line = re.sub(r"checkpoints/step-\d+", "checkpoints/best", line)
        run(f"{line} {FEW.get(line.split()[1], '')}")
    if python := blocks(page, "python"):
        assert "\\boxed{" in run(shlex.join(["python", "-c", python]))


def test_the_recipe_on_the_page_is_the_recipe() -> None:
    recipe = (ROOT / "examples" / "word_problems" / "recipe.yaml").read_text("utf-8")
    shown = blocks("own_model_and_data", "yaml")
    assert shown
    assert shown in re.sub(r" {2,}# .*", "", recipe)


def test_the_settings_on_the_page_about_a_calculator_are_those_of_its_recipe() -> None:
    recipe = read_recipe("calculator")
    shown = parse_yaml(blocks("calculator", "yaml"), "the page")
    assert shown
    for section, settings in shown.items():
        assert settings.items() <= recipe[section].items()
