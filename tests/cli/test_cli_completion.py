"""`brorl completion`: a script that a shell reads, and that completes commands, options and settings."""

import subprocess
from pathlib import Path
from shutil import which

import pytest

from brorl.cli import COMMANDS
from brorl.config.reading import setting_fields
from brorl.config.settings import TrainConfig
from run_support import command


def completed_in_bash(script: Path, *words: str) -> list[str]:
    """Return what bash offers after the words."""
    program = f"""
source {script}
COMP_WORDS=({" ".join(f"'{word}'" for word in words)}); COMP_CWORD={len(words) - 1}
"$(complete -p brorl | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, cwd=script.parent)
    return done.stdout.split()


@pytest.mark.skipif(which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_options_settings_and_files(tmp_path: Path) -> None:
    outcome = command("completion", "bash")
    assert (outcome.code, outcome.err) == (0, "")
    script = tmp_path / "brorl.bash"
    script.write_text(outcome.out)
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "directory").mkdir()
    assert set(COMMANDS) <= set(completed_in_bash(script, "brorl", ""))
    assert completed_in_bash(script, "brorl", "re") == [name for name in COMMANDS if name.startswith("re")]
    names = {f"--{name}" for name, _ in setting_fields(TrainConfig)}
    assert names <= set(completed_in_bash(script, "brorl", "train", "--"))
    assert completed_in_bash(script, "brorl", "train", "--loss.clip_l") == ["--loss.clip_low"]
    assert "--data" in completed_in_bash(script, "brorl", "eval", "--da")
    assert "mine.yaml" in completed_in_bash(script, "brorl", "train", "mi")
    assert set(completed_in_bash(script, "brorl", "completion", "")) >= {"bash", "zsh", "fish"}
    for words, offered in {  # the values of literals, of a bool, of a list, recipes and models by name or file
        ("train", "--advantage.estimator", "r"): ["reinforce_pp_baseline", "rloo"],
        ("train", "--dynamic-sampling.enabled", ""): ["true", "false"],
        ("resume", "--tracking.to", "w"): ["wandb"],
        ("train", "--optimizer.schedule", "c"): ["constant", "cosine"],
        ("train", "--output_dir", "di"): ["directory"],
        ("train", "quickstart-"): ["quickstart-16"],
        ("compare", "plateau-16", "plateau-5"): ["plateau-512"],
        ("tune", "small/"): ["small/brorl", "small/prorl"],
        ("plan", "--recipe", "quickstart-"): ["quickstart-16"],
        ("eval", "pla"): ["plateau"],
        ("train", "--model", "q"): ["quickstart"],
        ("eval", "--data", "gpqa"): ["gpqa_diamond"],
    }.items():
        assert completed_in_bash(script, "brorl", *words) == offered, words


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_all_settings(shell: str, tmp_path: Path) -> None:
    outcome = command("completion", shell)
    assert (outcome.code, outcome.err) == (0, "")
    for name, _ in setting_fields(TrainConfig):
        assert name in outcome.out
    for value in ("reinforce_pp_baseline", "quickstart-16", "small/brorl", "plateau"):
        assert value in outcome.out
    if which(shell):
        script = tmp_path / "script"
        script.write_text(outcome.out)
        subprocess.run([shell, "-n", script], check=True)


def test_a_shell_that_is_unknown() -> None:
    outcome = command("completion", "tcsh")
    assert outcome.code == 2
    assert "invalid choice: 'tcsh' (choose from" in outcome.err
