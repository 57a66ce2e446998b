"""The tables and notes above the charts: their numbers are those of the metrics, of every kind of run."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from scipy import stats

from brorl.reporting.page import make_page
from brorl.reporting.summary import COSTS, best_evaluation, cost_row, run_notes, score_change, score_rows
from brorl.runs.run_directory import StoredRun
from made_up_runs import complete_steps, evaluation, fruitless_record, run_of

Records = list[dict[str, Any]]


def shown(run: StoredRun) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """The cells of each score, and those of the cost by their heading; all of them are on the page."""
    scores, cost, page = score_rows(run), cost_row(run), make_page([run])
    assert all(f">{cell}<" in page for row in (*scores, cost) for cell in row)
    assert all(note in page for note in run_notes(run))
    return {row[0]: row[1:] for row in scores}, dict(zip(COSTS, cost, strict=True))


def evaluated(counts: list[int], num_samples: int, rng: np.random.Generator, ks: tuple[int, ...] = (1, 2)) -> Any:
    made = evaluation(rng, num_samples, ks)
    for k in ks:
        value = np.mean([hit_rate(c, num_samples, k) for c in counts])
        made["pass_at"][str(k)] = {"value": float(value), "low": float(value) / 2, "high": float(value + 1) / 2}
    return made | {"num_prompts": len(counts), "prompts": {"num_correct": counts}}


def hit_rate(num_correct: int, num_samples: int, k: int) -> float:
    """The fraction of draws of k responses that hold a correct one, by listing them."""
    return float(np.mean([min(draw) < num_correct for draw in combinations(range(num_samples), k)]))


def test_what_rose_and_fell_is_told_by_an_interval_over_prompts(rng: np.random.Generator) -> None:
    n, prompts = 6, 40
    seen = set()
    for shift in (-2, 0, 2):
        before = rng.integers(2, 5, prompts)
        after = np.clip(before + shift + rng.permutation(np.repeat([-1, 1], prompts // 2)), 0, n)
        first, last = (evaluated(counts.tolist(), n, rng) for counts in (before, after))
        records = [
            {"step": 0, "evaluation": first},
            *complete_steps(rng, 3),
            {"step": 4, "update": {}, "evaluation": last},
        ]
        for k in (1, 2):
            direction, change = score_change(run_of(records), k)
            difference = [hit_rate(b, n, k) - hit_rate(a, n, k) for a, b in zip(before, after, strict=True)]
            mean, error = np.mean(difference), stats.sem(difference)
            other = [d for d in difference if abs(d) > 1e-12]
            unseen = np.sqrt(np.mean(np.square(other))) * stats.beta.ppf(0.975, 1, prompts)
            half = np.hypot(stats.t.ppf(0.975, prompts - 1) * error, unseen)
            low, high = mean - half, mean + half
            assert change is not None
            got = (change.value, change.low, change.high)
            assert got == pytest.approx((mean, max(low, -1), min(high, 1)), abs=1e-9)
            expected = "rose" if low > 0 else "fell" if high < 0 else "no change shown"
            assert direction == expected
            seen.add(expected)
            scores, _ = shown(run_of(records))
            at_first, at_last, told, concluded, best = scores[f"pass@{k}"]
            for cell, end, when in ((at_first, first, "before training"), (at_last, last, "after step 4")):
                assert cell.startswith(f"{end['pass_at'][str(k)]['value']:.3f} [")
                assert cell.endswith(when)
            signed = [f"{value:+.3f}".replace("-0.000", "+0.000") for value in got]
            assert told == f"{signed[0]} [{signed[1]}, {signed[2]}]"
            assert (concluded, best) == (expected, "–")  # noqa: RUF001
    assert seen == {"rose", "fell", "no change shown"}


def test_without_counts_only_intervals_that_do_not_overlap_show_a_change(rng: np.random.Generator) -> None:
    def with_interval(low: float, high: float) -> Any:
        made = evaluation(rng)
        del made["prompts"]
        return made | {"pass_at": {"1": {"value": (low + high) / 2, "low": low, "high": high}}}

    for (low, high), expected in (((0.31, 0.5), "rose"), ((0.29, 0.5), "no change shown"), ((0.0, 0.09), "fell")):
        records = [
            {"step": 0, "evaluation": with_interval(0.1, 0.3)},
            {"step": 5, "evaluation": with_interval(low, high)},
        ]
        assert score_change(run_of(records), 1) == (expected, None)


def test_a_run_in_which_nothing_changed_claims_nothing(rng: np.random.Generator) -> None:
    same = evaluation(rng)
    records = [{"step": 0, "evaluation": same}, *complete_steps(rng, 2), {"step": 3, "update": {}, "evaluation": same}]
    scores, _ = shown(run_of(records))
    assert {k: row[3] for k, row in scores.items()} == {f"pass@{k}": "no change shown" for k in (1, 4, 8)}


def test_the_best_evaluation_is_named_where_it_is_not_the_last(rng: np.random.Generator) -> None:
    scores = {0: 0.9, 10: 0.3, 20: 0.5, 30: 0.5, 40: 0.4}
    records = [{"step": step, "update": {}, "evaluation": evaluation(rng)} for step in scores]
    for record in records:
        record["evaluation"]["pass_at"]["1"]["value"] = scores[record["step"]]
    best = best_evaluation(run_of(records))
    assert best is not None
    assert best.step == 20
    scores, _ = shown(run_of(records))
    assert [row[-1] for row in scores.values()] == ["0.500 after step 20", "–", "–"]  # noqa: RUF001
    assert best_evaluation(run_of(records[:1])) is None
    for record in records:
        record["evaluation"]["pass_at"]["8"]["value"] = record["step"] % 40 / 100
    by_8 = run_of(records, **{"evaluation.best_k": "8"})
    best = best_evaluation(by_8)
    assert best is not None
    assert best.step == 30
    assert [row[-1] for row in score_rows(by_8)] == ["–", "–", "0.300 after step 30"]  # noqa: RUF001


def test_the_best_evaluation_is_not_that_of_untrained_weights(rng: np.random.Generator) -> None:
    """A line without an update is an evaluation of the weights of the step before, as for `checkpoints/best`."""
    records = [{"step": 1, "evaluation": evaluation(rng)}, {"step": 2, "update": {}, "evaluation": evaluation(rng)}]
    for record, score in zip(records, (0.9, 0.3), strict=True):
        record["evaluation"]["pass_at"]["1"]["value"] = score
    best = best_evaluation(run_of(records))
    assert best is not None
    assert best.step == 2


UNFINISHED = "The metrics end here: the run is not finished, or it was stopped."


def test_a_run_without_evaluations_says_so(rng: np.random.Generator) -> None:
    run = run_of([{"step": 0}, *complete_steps(rng, 7)], **{"evaluation.num_prompts": "0"})
    assert shown(run)[0] == {}
    assert "The run disabled this (evaluation.num_prompts: 0)." in make_page([run])


def test_one_evaluation_is_shown_and_no_change_is_claimed(rng: np.random.Generator) -> None:
    first = evaluation(rng)
    run = run_of([{"step": 0, "evaluation": first}, *complete_steps(rng, 2)], steps="9")
    scores, cost = shown(run)
    for k, value in first["pass_at"].items():
        assert scores[f"pass@{k}"][0].startswith(f"{value['value']:.3f} [")
        assert scores[f"pass@{k}"][1:4] == ("–", "–", "–")  # noqa: RUF001
    assert cost["steps"] == "2 of 9"
    assert UNFINISHED in run_notes(run)


def test_how_far_a_run_came(rng: np.random.Generator) -> None:
    records = [{"step": 0, "evaluation": evaluation(rng)}, *complete_steps(rng, 4)]
    done = run_of(records, steps="4")
    assert (shown(done)[1]["steps"], UNFINISHED in run_notes(done)) == ("4", False)
    samples = sum(r["sampling"]["samples"] for r in records[1:])
    for limit, finished in ((samples, True), (samples + 1, False)):
        budget = {"budget.limit": str(limit), "budget.unit": "samples", "steps": "1000000"}
        assert (UNFINISHED not in run_notes(run_of(records, **budget))) == finished
    ended = run_of([*records[:-1], records[-1] | {"end_reason": "step 4: the entropy fell"}], steps="9")
    assert "The run ended early after step 4: step 4: the entropy fell" in run_notes(ended)
    assert UNFINISHED not in run_notes(ended)


def test_a_run_in_which_nothing_was_ever_solved(rng: np.random.Generator) -> None:
    zero = evaluated([0] * 5, 4, rng)
    record = fruitless_record(rng, 1) | {"evaluation": zero}
    run = run_of([{"step": 0, "evaluation": zero}, record], steps="9")
    scores, cost = shown(run)
    assert {row[3] for row in scores.values()} == {"no change shown"}
    samples = f"{record['sampling']['samples']:,}"  # what looking in vain cost
    assert (cost["steps"], cost["rollouts"], cost["dropped"]) == ("0 of 9", samples, f"{samples} (100.0%)")
    assert any(note.startswith("The run ended early at step 1: ") for note in run_notes(run))


def test_a_resumed_run_is_not_said_to_have_ended(rng: np.random.Generator) -> None:
    records = [{"step": 0}, *complete_steps(rng, 1), fruitless_record(rng, 2), *complete_steps(rng, 3)[2:]]
    assert UNFINISHED not in run_notes(run_of(records, steps="3"))
    assert "The run ended early at step 2 and was resumed later: no group had both" in run_notes(run_of(records))
