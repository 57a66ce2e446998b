"""`brorl.plan` against `brorl plan`, its result, and the meaning of its arguments."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import brorl
from brorl.api.plan import _resolve
from brorl.config.reading import flat_settings, parse_yaml
from brorl.planning.advice import PlanResult
from brorl.table import Table
from run_support import SMALL, command

PILOT = {"pilot_prompts": 12, "pilot_rollouts": 8, "rollouts": [4, 16, 64]}
TIMED = ("seconds", "budget", "noise", "to_best", "tokens_per_second", "probes", "cost", "time_error")
OVERRIDES = {
    name: parse_yaml(value, name) for name, _, value in (text.removeprefix("--").partition("=") for text in SMALL)
}


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def without_times(value: Any) -> Any:
    """Drop the numbers that depend on the machine's speed."""
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if not any(word in k for word in TIMED)}
    return [without_times(v) for v in value] if isinstance(value, list) else value


@pytest.mark.slow
def test_the_function_plans_as_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    result = brorl.plan(**PILOT, seconds_per_step=2.5, output_dir="mine", progress=False, **OVERRIDES)
    assert capsys.readouterr().out == ""
    outcome = command(
        "plan", *SMALL, "--pilot-prompts=12", "--pilot-rollouts=8", "--rollouts=4,16,64", "--seconds-per-step=2.5",
        "--output-dir=theirs",
    )  # fmt: skip
    assert outcome.code == 0, outcome
    mine, theirs = (json.loads(Path(folder, "plan.json").read_text()) for folder in ("mine", "theirs"))
    assert mine.keys() == theirs.keys()
    mine_recommended = mine["recommendation"]
    assert next(iter(mine)) == "recommendation"
    for record in (mine, theirs):
        assert record.pop("recommendation")["seconds_per_step"] == 2.5
    assert without_times(mine) == without_times(theirs)

    assert isinstance(result, PlanResult)
    assert [row.num_rollouts for row in result.plan.rows] == [4, 16, 64]
    assert result.recommended is not None
    assert result.train_command is not None
    words = shlex.split(result.train_command)
    assert words[:3] == ["brorl", "train", "quickstart"]
    assert words[words.index("--rollouts_per_prompt") + 1] == str(result.recommended.num_rollouts)
    assert words[words.index("--prompts_per_step") + 1] == str(result.recommended.budget_prompts)
    page = result._repr_html_()
    for text in ("Steps of 2.5 s", "mine/plan.json", "use this"):
        assert text in page
    assert result.compare_command is not None
    assert "--advantage" not in result.train_command + result.compare_command  # the recipe keeps its objective
    assert mine_recommended["lines"][0].startswith("For pass@1, use N = ")
    assert page.index("For pass@1, use N") < page.index("Steps of 2.5 s") < page.index("the pilot:")
    assert len(repr(result)) < 300


def test_what_a_checkpoint_argument_means(short_run: Path, tmp_path: Path) -> None:
    def means(checkpoint: Any = None, recipe: Any = None, **given: Any) -> tuple[str, int, int]:
        config, _ = _resolve(checkpoint, recipe, flat_settings(given))
        return config.model, config.rollouts_per_prompt, config.seed

    checkpoint = short_run / "checkpoints" / "step-000001"
    assert means() == means("quickstart") == ("quickstart", 512, 0)
    assert means("some/hub-id") == ("some/hub-id", 512, 0)
    assert means(tmp_path) == (str(tmp_path), 512, 0)
    assert means(short_run) == means(checkpoint) == (str(checkpoint), 16, 5)
    assert means(short_run, "quickstart") == (str(checkpoint), 512, 0)
    assert means(short_run, seed=9) == (str(checkpoint), 16, 9)
    assert means(None, {"rollouts_per_prompt": 32, "steps": 3}) == ("quickstart", 32, 0)
    with pytest.raises(brorl.UserError, match="both name a model"):
        means("quickstart", model="other")


def test_an_interrupted_plan_leaves_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PlanResult, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        brorl.plan(**PILOT, output_dir="new", progress=False, **OVERRIDES)
    assert not Path("new").exists()
    Path("old").mkdir()
    assert command("plan", *SMALL, "--output-dir=old").code == 130
    assert Path("old").is_dir()


@pytest.mark.slow
def test_a_check_from_python_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    from brorl.api.check import check

    result = check("quickstart", timing=False, progress=False, **OVERRIDES)
    assert capsys.readouterr().out == ""
    outcome = command("check", *SMALL, "--no-timing")
    printed = [line for line in outcome.out.splitlines() if "available" not in line]
    [table] = (part for part in result.lines if isinstance(part, Table))
    texts = [part.plain for part in result.lines if not isinstance(part, Table)]
    after = iter(printed)
    assert all(line in after for text in texts for line in text.split("\n") if "available" not in line)
    assert "What a run needs by how it trains" in outcome.out
    for row in table.rows:
        assert all(word in outcome.out.split() for cell in row for word in cell.split())
    assert result.forecast is None
    assert [trial.right_verdict.correct for trial in result.trials] == [True]
    assert "settings of quickstart: ok" in result._repr_html_()


@pytest.mark.slow
def test_numbers_that_the_objective_refuses_are_left_out() -> None:
    settings = {**OVERRIDES, "advantage.estimator": "pass_at_k", "advantage.k": 5}
    result = brorl.plan(**PILOT, progress=False, **settings)
    assert [row.num_rollouts for row in result.plan.rows] == [16, 64]
