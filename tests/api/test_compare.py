"""`brorl.compare` from Python: the result against the files that it writes, and a script that calls it."""

import html
import json
import re
import subprocess
import sys
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from brorl.api.compare import compare
from brorl.comparison import answer as comparison_report
from brorl.comparison.answer import FinishedComparison
from brorl.comparison.arm_recipes import ArmRecipe, check_arms, read_arms, run_config, sweep_arms
from brorl.comparison.spec import ComparisonRequest, spec_for
from brorl.config.reading import make_config, parse_yaml, read_recipe
from brorl.cost import Budget, Unit
from brorl.errors import UserError
from each_row import each_row
from run_support import SMALL

TINY: dict[str, Any] = {
    name.removeprefix("--"): parse_yaml(value, name)
    for name, value in (option.split("=", 1) for option in SMALL)
    if name not in ("--rollouts_per_prompt", "--prompts_per_step", "--evaluation.every", "--report")
}
BUDGET: dict[str, Any] = {"match": "steps", "budget": 4, "eval_points": [2], "seeds": 1, "jobs": 1}


@pytest.mark.parametrize(
    ("own", "every"), [({"evaluation.patience": 2}, 3), ({"budget.pause_at": 2.0, "budget.limit": 9.0}, 0)]
)
def test_a_run_keeps_the_evaluations_that_end_it_and_never_pauses(
    own: dict[str, Any], every: int, tmp_path: Path
) -> None:
    config = make_config(read_recipe("quickstart"), {"evaluation.every": 3} | own, "quickstart")
    run = run_config(ArmRecipe("arm", config), 0, tmp_path, Budget("steps", 9))
    assert (run.evaluation.every, run.evaluation.patience) == (every, config.evaluation.patience)
    assert (run.budget.limit, run.budget.pause_at) == (9, None)
    with pytest.raises(UserError, match=r"budget\.pause_at` is set by the comparison; use `budget"):
        compare("quickstart", "quickstart-16", **{"budget.pause_at": 2.0})


@each_row(("unit", "budget"), [("seconds", 0.1), *product(("seconds", "steps"), (1_048_576.0, 1_048_580.0, 7.0))])
def test_evaluation_points_rise_to_the_budget(budget: float, unit: Unit) -> None:
    """They do so even where a point just below the budget is rounded to more than the budget."""
    for points_or_number in (None, 1, 9, [budget * (1 - 1e-9)], [budget / 3, budget]):
        request = ComparisonRequest(("quickstart",), match=unit, budget=budget, eval_points=points_or_number)
        points = spec_for(None, request).eval_points
        assert points[-1] == budget
        assert all(0 < a < b for a, b in pairwise(points))


@pytest.mark.slow
def test_settings_that_end_a_run_may_differ_between_arms() -> None:
    ends = {"evaluation.every": 5, "evaluation.patience": 3, "evaluation.best_k": 1}
    arms = read_arms(["quickstart", make_config(read_recipe("quickstart-16"), ends, "quickstart-16")], {})
    check_arms(arms, "seconds", 1, 1)
    other = make_config(read_recipe("quickstart-16"), {"evaluation.temperature": 0.5}, "quickstart-16")
    with pytest.raises(UserError, match=r"evaluation\.temperature"):
        check_arms(read_arms(["quickstart", other], {}), "seconds", 1, 1)
    # arms that train on different tokens would be measured on different tokens
    for name, value in (("top_k", 5), ("top_p", 0.9), ("min_new_tokens", 3)):
        other = make_config(read_recipe("quickstart-16"), {f"sampling.{name}": value}, "quickstart-16")
        with pytest.raises(UserError, match=rf"evaluation\.{name} is .* to evaluate them alike: --evaluation\.{name}"):
            check_arms(read_arms(["quickstart", other], {}), "seconds", 1, 1)


def test_the_settings_of_an_arm_may_be_paths(tmp_path: Path) -> None:
    recipe = read_recipe("quickstart")
    arms = read_arms([recipe | {"data": {"sources": [{"path": tmp_path / "a.jsonl"}]}}, "quickstart-16"], {})
    assert arms[0].config.data.sources[0].path == str(tmp_path / "a.jsonl")
    (other, _) = sweep_arms(recipe, {"output_dir": tmp_path}, {"rollouts_per_prompt": [8, 16]})
    assert other.config.output_dir == str(tmp_path)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run a script that calls `compare` at the top, without a guard; return its folder and its output."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "script.py").write_text(
        "from brorl.api.compare import compare\nfrom brorl.config.reading import make_config, read_recipe\n"
        "print('started')\nrecipe = read_recipe('quickstart')\n"
        "other = make_config(recipe, {'rollouts_per_prompt': 16}, 'quickstart')\n"
        "arms = recipe | {'rollouts_per_prompt': 8}, other\n"
        f"compared = compare(*arms, output_dir='out', progress=False, **{BUDGET | TINY | {'prompts_per_step': 2}!r})\n"
        "print(len(compared.comparison.arms), 'arms')\n"
    )
    outcome = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, check=False, timeout=500
    )
    assert outcome.returncode == 0, outcome.stderr
    return folder / "out", outcome.stdout


@pytest.fixture(scope="module")
def compared(script: tuple[Path, str]) -> FinishedComparison:
    return compare(script[0], progress=False)


@pytest.mark.slow
def test_the_result_carries_what_was_measured(compared: FinishedComparison) -> None:
    assert [arm.num_rollouts for arm in compared.comparison.arms] == [8, 16]
    assert compared.comparison.unit == "steps"
    ends = []
    for arm in compared.comparison.arms:
        (run,) = arm.runs
        records = [json.loads(line) for line in (Path(run.path) / "metrics.jsonl").read_text().splitlines()]
        assert [r["step"] for r in records if "evaluation" in r] == [0, 2, 4]
        evaluation = records[-1]["evaluation"]
        ends.append(np.array(evaluation["prompts"]["num_correct"]) / evaluation["num_samples"])
    assert compared.pair is not None
    assert compared.pair[1].difference.value == pytest.approx((ends[1] - ends[0]).mean(), abs=1e-12)
    record = json.loads((compared.path / "comparison.json").read_text())
    assert record["summary"] == [*compared.answer, *compared.caveats]
    assert [file.name for file in compared.files] == [
        "comparison.json", "comparison.png", "comparison.html",
    ]  # fmt: skip
    _, figure, page = compared.files
    assert all(table._repr_html_() in page.read_text() for table in compared.tables)
    assert imread(figure).std() > 0.05  # something is drawn
    assert compared.answer[0] in html.unescape(page.read_text())


@pytest.mark.slow
def test_a_notebook_and_a_terminal_show_the_answer_one_table_and_the_caveats(compared: FinishedComparison) -> None:
    shown = " ".join(html.unescape(re.sub(r"<[^>]*>", "", compared._repr_html_())).split())
    for text in (compared.answer[0], compared.tables[0].title, *compared.caveats):
        assert " ".join(text.split()) in shown
    assert not any(table.title in shown for table in compared.tables[1:])
    assert len(compared.caveats) <= 3
    assert compared.answer[0] in repr(compared)


@pytest.mark.slow
def test_the_same_call_and_the_folder_give_the_same_result_without_new_runs(
    compared: FinishedComparison, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comparison_report, "make_figure", lambda *_: Figure())
    before = {p: p.stat().st_mtime_ns for p in compared.path.glob("arms/*/*/*")}
    again = compare(compared.path, progress=False)
    assert (again.answer, again.tables) == (compared.answer, compared.tables)
    assert capsys.readouterr().out == ""
    assert {p: p.stat().st_mtime_ns for p in compared.path.glob("arms/*/*/*")} == before
    with pytest.raises(UserError, match=r"which `evaluation\.rollouts_per_prompt` cannot change"):
        compare(compared.path, evaluation={"rollouts_per_prompt": 3})
    with pytest.raises(UserError, match="which `output_dir` cannot change"):
        compare(compared.path, output_dir="elsewhere")


@pytest.mark.slow
def test_a_script_is_not_run_again_by_its_runs(script: tuple[Path, str]) -> None:
    assert script[1] == "started\n2 arms\n"
