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
from brorl.reporting.summary import reason, why_missing
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
    why = "No update was made: no group was mixed (correct and incorrect rollouts). No rollout was correct."
    empty = reasons(run)
    assert {name for name, text in empty.items() if text == why} == COVERAGE | HELD_OUT_CHECK | UPDATE
    assert empty["held-out"] == "A change needs two evaluations with the same prompts and samples."
    assert "pass1" not in empty
    assert "reward" not in empty
    assert left_out(run, ()) == f"Training: {why}"
    page = make_page([run])
    assert why in page[page.index('id="card-success"') : page.index('id="coverage"')]


@pytest.mark.parametrize(
    ("mixed", "all_correct", "said"),
    [
        (0, 0, "No update was made: no group was mixed (correct and incorrect rollouts). No rollout was correct."),
        (0, 4, "No update was made: no group was mixed (correct and incorrect rollouts). Every rollout was correct."),
        (0, 1, "No update was made: no group was mixed (correct and incorrect rollouts)."),
        (2, 0, "No update was made: only 2 of 4 groups were mixed (correct and incorrect rollouts)."),
    ],
)
def test_why_no_update_was_made(rng: np.random.Generator, mixed: int, all_correct: int, said: str) -> None:
    record = fruitless_record(rng, 1)
    record["sampling"] |= {"groups_mixed": mixed, "groups_all_correct": all_correct}
    assert record["sampling"]["groups"] == 4
    assert why_missing(run_of([record]), "update") == said


def test_a_run_that_has_just_begun(rng: np.random.Generator) -> None:
    empty = reasons(run_of([{"step": 0, "evaluation": evaluation(rng)}]))
    assert empty.pop("held-out") == "A change needs two evaluations with the same prompts and samples."
    assert set(empty.values()) == {"No step is complete yet."}
    assert COVERAGE | HELD_OUT_CHECK | UPDATE | {"reward", "mixed", "sharing", "seconds", "lost"} <= set(empty)


def test_what_is_off_or_not_due_or_was_not_measured(rng: np.random.Generator) -> None:
    records = complete_steps(rng, 3)
    for record in records:
        del record["coverage"]
    every, none = "diagnostics.held_out_check_every", "The metrics contain no such number."
    off = f"The run disabled this ({every}: 0)."
    later = f"The first is due at step 25 ({every}), and the run is at step 3."
    for value, said in (("0", off), ("25", later), ("2", none)):
        empty = reasons(run_of(records, **{every: value}))
        assert {empty[name] for name in HELD_OUT_CHECK} == {said}
        assert {empty[name] for name in COVERAGE} == {none}
    held_out_check = {"change": 0.1, "change_low": 0.0, "change_high": 0.2, "fraction_improved": None, "num_correct": 0}
    records[1]["held_out_check"] = held_out_check
    empty = reasons(run_of(records, **{every: "2"}))
    assert "held_out_check" not in empty
    assert empty["improved"] == none
    off = reasons(run_of(records, **{"evaluation.num_prompts": "0"}))
    assert {off[name] for name in ("pass1", "passk", "held-out")} == {
        "The run disabled this (evaluation.num_prompts: 0)."
    }
    assert why_missing(run_of(records), "evaluation") == none


def test_evaluations_of_other_prompts_show_no_change(rng: np.random.Generator) -> None:
    different = [{"step": 0, "evaluation": evaluation(rng)}, {"step": 1, "evaluation": evaluation(rng)}]
    different[1]["evaluation"]["prompts"]["num_correct"].pop()
    assert reasons(run_of(different))["held-out"] == "A change needs two evaluations with the same prompts and samples."


def test_why_no_responses_were_stored(tmp_path: Path, rng: np.random.Generator) -> None:
    records = [{"step": 0, "evaluation": evaluation(rng)}, *complete_steps(rng, 3)]
    off = "The run disabled this (store_rollouts_every: 0)."
    later = "The first is due at step 10 (store_rollouts_every), and the run is at step 3."
    for every, training in (("0", off), ("10", later), ("1", f"There are no responses in {Path('run/rollouts')}.")):
        run = run_of(records, store_rollouts_every=every)
        assert left_out(run, ()) == f"Training: {training}"
        held_out = off if every == "0" else f"There are no responses in {Path('run/evaluations')}."
        assert evaluations_shown(run, ()) == f"Held-out prompts: {held_out}"
    make_run(tmp_path / "run", rng)
    run = read_run(tmp_path / "run")
    said = evaluations_shown(run, choose_evaluations(run, token_text(None), 1_000_000))
    assert said.startswith("Held-out prompts: the responses to 3 of 12 prompts, chosen by their position in the list")
    assert f"brorl samples {tmp_path / 'run'} --held-out" in said
    interrupted = replace(run, records=run.records[1:2])  # stored, and the metrics record is not written yet
    said = evaluations_shown(interrupted, choose_evaluations(interrupted, token_text(None), 1_000_000))
    assert said.startswith("Held-out prompts: the responses to 3 prompts, chosen by")


def test_several_runs_have_a_reason_each_where_they_differ(rng: np.random.Generator) -> None:
    begun, fruitless = run_of([{"step": 0}]), run_of([fruitless_record(rng, 1)])
    assert reason([begun, begun], "update") == "No step is complete yet."
    said = reason([begun, fruitless], "update")
    assert said == f"run: No step is complete yet. run: {why_missing(fruitless, 'update')}"
