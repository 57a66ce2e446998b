"""Why there is nothing to show: each reason is true of the run, and no other reason is given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brorl.reporting.charts import charts_of
from brorl.reporting.page import evaluations_shown, left_out, make_page
from brorl.reporting.page_rollouts import choose_evaluations
from brorl.reporting.summary import missing_reason, why_missing
from brorl.reporting.tokens import token_text
from brorl.runs.run_directory import StoredRun, read_run
from made_up_runs import complete_steps, evaluation, fruitless_record, make_run, run_of

Records = list[dict[str, Any]]
COVERAGE = {"success", "mixed-n", "unsampled", "unsampled-n"}
HELD_OUT_CHECK = {"held_out_check", "improved"}
UPDATE = {"entropy", "kl", "clip", "gradient"}


def reasons(run: StoredRun) -> dict[str, str]:
    """The reason of each chart that is empty; every one is on the page."""
    charts = [chart for some in charts_of([run]).values() for chart in some]
    page = make_page([run])
    empty = {chart.name: chart.empty for chart in charts if not chart.traces and not chart.histogram}
    for why in empty.values():
        assert why.endswith(".")
        assert why in page
    return empty


def test_a_run_in_which_nothing_was_solved_says_so_everywhere(rng: np.random.Generator) -> None:
    settings = {"evaluation.num_prompts": "8", "store_rollouts_every": "1"}
    run = run_of([{"step": 0, "evaluation": evaluation(rng)}, fruitless_record(rng, 1)], **settings)
    why = why_missing(run, "update")
    empty = reasons(run)
    assert {name for name, text in empty.items() if text == why} == COVERAGE | HELD_OUT_CHECK | UPDATE
    assert "two evaluations" in empty["held-out"]
    assert "pass1" not in empty
    assert "reward" not in empty
    assert left_out(run, ()) == f"Training: {why}"
    page = make_page([run])
    assert why in page[page.index('id="card-success"') : page.index('id="coverage"')]


@pytest.mark.parametrize(
    ("mixed", "all_correct", "stated"),
    [
        (0, 0, {"no group", "No rollout"}),
        (0, 4, {"no group", "Every rollout"}),
        (0, 1, {"no group"}),
        (2, 0, {"only 2 of 4 groups"}),
    ],
)
def test_why_no_update_was_made(rng: np.random.Generator, mixed: int, all_correct: int, stated: set[str]) -> None:
    record = fruitless_record(rng, 1)
    record["sampling"] |= {"groups_mixed": mixed, "groups_all_correct": all_correct}
    assert record["sampling"]["groups"] == 4
    why = why_missing(run_of([record]), "update")
    assert {
        reason for reason in ("no group", "only 2 of 4 groups", "No rollout", "Every rollout") if reason in why
    } == stated


def test_a_run_that_has_just_begun(rng: np.random.Generator) -> None:
    run = run_of([{"step": 0, "evaluation": evaluation(rng)}])
    empty = reasons(run)
    assert "two evaluations" in empty.pop("held-out")
    assert set(empty.values()) == {why_missing(run, "step")}
    assert COVERAGE | HELD_OUT_CHECK | UPDATE | {"reward", "mixed", "sharing", "seconds", "lost"} <= set(empty)


def test_what_is_off_or_not_due_or_was_not_measured(rng: np.random.Generator) -> None:
    records = complete_steps(rng, 3)
    for record in records:
        del record["coverage"]
    every = "diagnostics.held_out_check_every"
    none = why_missing(run_of(records), "evaluation")
    for value, stated in (("0", f"({every}: 0)"), ("25", f"at step 25 ({every})"), ("2", none)):
        empty = reasons(run_of(records, **{every: value}))
        (why,) = {empty[name] for name in HELD_OUT_CHECK}
        assert stated in why
        assert {empty[name] for name in COVERAGE} == {none}
    held_out_check = {"change": 0.1, "change_low": 0.0, "change_high": 0.2, "fraction_improved": None, "num_correct": 0}
    records[1]["held_out_check"] = held_out_check
    empty = reasons(run_of(records, **{every: "2"}))
    assert "held_out_check" not in empty
    assert empty["improved"] == none
    off = reasons(run_of(records, **{"evaluation.num_prompts": "0"}))
    (why,) = {off[name] for name in ("pass1", "passk", "held-out")}
    assert "(evaluation.num_prompts: 0)" in why


def test_evaluations_of_other_prompts_show_no_change(rng: np.random.Generator) -> None:
    different = [{"step": 0, "evaluation": evaluation(rng)}, {"step": 1, "evaluation": evaluation(rng)}]
    different[1]["evaluation"]["prompts"]["num_correct"].pop()
    assert "the same prompts and samples" in reasons(run_of(different))["held-out"]


def test_why_no_responses_were_stored(tmp_path: Path, rng: np.random.Generator) -> None:
    records = [{"step": 0, "evaluation": evaluation(rng)}, *complete_steps(rng, 3)]
    off = "(store_rollouts_every: 0)"
    for every, training in (("0", off), ("10", "at step 10 (store_rollouts_every)"), ("1", str(Path("run/rollouts")))):
        run = run_of(records, store_rollouts_every=every)
        assert training in left_out(run, ())
        assert (off if every == "0" else str(Path("run/evaluations"))) in evaluations_shown(run, ())
    make_run(tmp_path / "run", rng)
    run = read_run(tmp_path / "run")
    shown = evaluations_shown(run, choose_evaluations(run, token_text(None), 1_000_000))
    assert "3 of 12 prompts" in shown
    assert f"brorl samples {tmp_path / 'run'} --held-out" in shown
    interrupted = replace(run, records=run.records[1:2])  # stored, and the metrics record is not written yet
    shown = evaluations_shown(interrupted, choose_evaluations(interrupted, token_text(None), 1_000_000))
    assert " 3 prompts" in shown


def test_several_runs_have_a_reason_each_where_they_differ(rng: np.random.Generator) -> None:
    begun = run_of([{"step": 0}])
    fruitless = run_of([fruitless_record(rng, 1)])
    whys = [why_missing(run, "update") for run in (begun, fruitless)]
    assert missing_reason([begun, begun], "update") == whys[0]
    assert missing_reason([begun, fruitless], "update") == f"run: {whys[0]} run: {whys[1]}"
