"""The commands of the tutorials, run in their order with fewer steps, prompts and samples.

tests/test_own_model_own_data.py runs its tutorial as it is written.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FEW = {
    "train": "--steps 2 --prompts_per_step 4 --evaluation.num_prompts 8 --dynamic_sampling.enabled false",
    "eval": "--samples 16",
    "plan": "--pilot-prompts 8 --pilot-rollouts 16",
    "compare": "--match steps --budget 2 --marks 1 --seeds 2 --evaluation.num_prompts 8",
}
NEED_THE_HUB = ("brorl train prorl ", "brorl train brorl ")  # their model is not on this machine


def commands(page: str) -> list[str]:
    """Return the commands of a page without their comments, in order."""
    text = (ROOT / "docs" / "tutorials" / f"{page}.md").read_text("utf-8")
    lines = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ").splitlines()
    found = [line.partition(" #")[0].strip() for line in lines if line.startswith("brorl ")]
    return [line for line in found if not line.startswith(NEED_THE_HUB)]


@pytest.mark.example
@pytest.mark.parametrize("page", ["first_run", "from_a_plateau", "long_run", "read_a_comparison"])
def test_the_commands_of_a_tutorial_work(page: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def run(line: str) -> None:
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"

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
