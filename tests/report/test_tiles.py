"""The tiles above the charts: their numbers are those of the metrics, and they are true of every kind of run."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from scipy import stats

from brorl.reporting.page.page import make_page
from brorl.reporting.page.summary import Tile, best_evaluation, notes, score_change, tiles
from made_up_runs import complete_steps, evaluation, fruitless_record, run_of

Records = list[dict[str, Any]]


def tiles_of(records: Records, **settings: str) -> dict[str, Tile]:
    run = run_of(records, **settings)
    made = {tile.title: tile for tile in tiles(run)}
    page = make_page([run])
    for tile in made.values():
        assert tile.figures or tile.text
        assert tile.text in page
        assert all(figure.value in page for figure in tile.figures)
    return made


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
            low, high = stats.t.interval(0.95, prompts - 1, mean, error)
            assert change is not None
            got = (change.value, change.low, change.high)
            assert got == pytest.approx((mean, max(low, -1), min(high, 1)), abs=1e-9)
            expected = "rose" if low > 0 else "fell" if high < 0 else "unclear"
            assert direction == expected
            seen.add(expected)
            title = {"rose": "Scores that rose", "fell": "Scores that fell", "unclear": "No clear change"}[expected]
            signed = [f"{value:+.3f}".replace("-0.000", "+0.000") for value in got]
            (figure,) = [f for f in tiles_of(records)[title].figures if f.label == f"held-out pass@{k}"]
            assert (
                figure.value.replace("\u00a0", " ")
                == f"{first['pass_at'][str(k)]['value']:.3f} → {last['pass_at'][str(k)]['value']:.3f}"
            )
            assert figure.details[0].replace("\u00a0", " ") == f"change {signed[0]} [{signed[1]}, {signed[2]}]"
            assert "before training" in figure.details[1]
            assert "after step 4" in figure.details[1]
    assert seen == {"rose", "fell", "unclear"}


def test_without_counts_only_intervals_that_do_not_overlap_show_a_change(rng: np.random.Generator) -> None:
    def with_interval(low: float, high: float) -> Any:
        made = evaluation(rng)
        del made["prompts"]
        return made | {"pass_at": {"1": {"value": (low + high) / 2, "low": low, "high": high}}}

    for (low, high), expected in (((0.31, 0.5), "rose"), ((0.29, 0.5), "unclear"), ((0.0, 0.09), "fell")):
        records = [
            {"step": 0, "evaluation": with_interval(0.1, 0.3)},
            {"step": 5, "evaluation": with_interval(low, high)},
        ]
        assert score_change(run_of(records), 1) == (expected, None)


def test_a_run_in_which_nothing_changed_claims_nothing(rng: np.random.Generator) -> None:
    same = evaluation(rng)
    made = tiles_of(
        [{"step": 0, "evaluation": same}, *complete_steps(rng, 2), {"step": 3, "update": {}, "evaluation": same}]
    )
    assert made["Scores that rose"].figures == made["Scores that fell"].figures == ()
    tile = made["Scores that rose"]
    assert (tile.tone, tile.text) == ("plain", "No held-out score clearly rose.")
    tile = made["Scores that fell"]
    assert (tile.tone, tile.text) == ("plain", "No held-out score clearly fell.")
    assert [f.label for f in made["No clear change"].figures] == [f"held-out pass@{k}" for k in (1, 4, 8)]


def test_the_best_evaluation_is_named_where_it_is_not_the_last(rng: np.random.Generator) -> None:
    scores = {0: 0.9, 10: 0.3, 20: 0.5, 30: 0.5, 40: 0.4}
    records = [{"step": step, "update": {}, "evaluation": evaluation(rng)} for step in scores]
    for record in records:
        record["evaluation"]["pass_at"]["1"]["value"] = scores[record["step"]]
    best = best_evaluation(run_of(records))
    assert best is not None
    assert best["step"] == 20
    details = [d for tile in tiles_of(records).values() for f in tile.figures for d in f.details]
    assert [d for d in details if d.startswith("best")] == ["best: 0.500 after step 20"]
    assert best_evaluation(run_of(records[:1])) is None
    for record in records:
        record["evaluation"]["pass_at"]["8"]["value"] = record["step"] % 40 / 100
    by_8 = run_of(records, **{"evaluation.best_k": "8"})
    best = best_evaluation(by_8)
    assert best is not None
    assert best["step"] == 30
    details = [d for tile in tiles(by_8) for f in tile.figures for d in f.details]
    assert [d for d in details if d.startswith("best")] == ["best: 0.300 after step 30"]


def test_the_best_evaluation_is_not_that_of_untrained_weights(rng: np.random.Generator) -> None:
    """A line without an update is an evaluation of the weights of the step before, as for `checkpoints/best`."""
    records = [{"step": 1, "evaluation": evaluation(rng)}, {"step": 2, "update": {}, "evaluation": evaluation(rng)}]
    for record, score in zip(records, (0.9, 0.3), strict=True):
        record["evaluation"]["pass_at"]["1"]["value"] = score
    best = best_evaluation(run_of(records))
    assert best is not None
    assert best["step"] == 2


def test_a_run_without_evaluations_shows_its_reward(rng: np.random.Generator) -> None:
    records = [{"step": 0}, *complete_steps(rng, 7)]
    made = tiles_of(records, **{"evaluation.num_prompts": "0"})
    learned = made["Learning"]
    assert learned.text == "The run made no evaluations (evaluation.num_prompts: 0)."
    rewards = [r["sampling"]["reward"] for r in records[1:]]
    (figure,) = learned.figures
    assert figure.label == "reward in training"
    ends = f"{np.mean(rewards[:3]):.3f} → {np.mean(rewards[-3:]):.3f}"
    assert figure.value.replace("\u00a0", " ") == ends
    assert not {"Scores that rose", "Scores that fell"} & set(made)


def test_one_evaluation_is_shown_and_no_change_is_claimed(rng: np.random.Generator) -> None:
    first = evaluation(rng)
    made = tiles_of([{"step": 0, "evaluation": first}, *complete_steps(rng, 2)], steps="9")
    learned = made["Learning"]
    assert learned.text == "There is one evaluation so far; a change needs two."
    expected = [(f"held-out pass@{k}", f"{v['value']:.3f}") for k, v in first["pass_at"].items()]
    assert [(f.label, f.value) for f in learned.figures] == expected
    assert made["Progress"].figures[0].value == "2 of 9"
    assert made["Progress"].text == "The metrics end here: the run is not finished, or it was stopped."


def test_how_far_a_run_came(rng: np.random.Generator) -> None:
    records = [{"step": 0, "evaluation": evaluation(rng)}, *complete_steps(rng, 4)]
    done = tiles_of(records, steps="4")["Progress"]
    assert (done.figures[0].value, done.text) == ("4", "")
    samples = sum(r["sampling"]["samples"] for r in records[1:])
    for limit, finished in ((samples, True), (samples + 1, False)):
        budget = {"budget.limit": str(limit), "budget.unit": "samples", "steps": "1000000"}
        assert (tiles_of(records, **budget)["Progress"].text == "") == finished
    fell, stalled = "step 4: the entropy fell", "4 evaluations in a row without a pass@1 above 0.500"
    no_longer = "its evaluations no longer rose (evaluation.patience)"
    for end, why in (
        ({"ended": fell, "collapse": fell}, "signs of collapse"),
        ({"ended": stalled}, no_longer),
        ({"ended": stalled, "collapse": fell}, no_longer),  # the signs ended nothing (collapse.stop: false)
    ):
        ended = [*records[:-1], records[-1] | end]
        text = tiles_of(ended, steps="9")["Progress"].text
        assert text == f"The run ended early, after step 4: {why}."
        assert f"The run ended early after step 4: {end['ended']}" in notes(run_of(ended))


def test_a_run_in_which_nothing_was_ever_solved(rng: np.random.Generator) -> None:
    zero = evaluated([0] * 5, 4, rng)
    record = fruitless_record(rng, 1) | {"evaluation": zero}
    made = tiles_of([{"step": 0, "evaluation": zero}, record], steps="9")
    assert made["Progress"].figures[0].value == "0 of 9"
    text = made["Progress"].text
    assert text.startswith("The run ended early, at step 1: too few mixed groups.")
    assert text.endswith("no group was mixed (correct and incorrect rollouts). No rollout was correct.")
    assert made["Scores that rose"].figures == made["Scores that fell"].figures == ()
    cost = made["Cost"].figures
    assert cost[1].value == f"{record['sampling']['samples']:,}"  # what looking in vain cost
    assert made["Dropped by dynamic sampling"].figures[0].details == ("100.0% of those sampled",)


def test_a_resumed_run_is_not_said_to_have_ended(rng: np.random.Generator) -> None:
    records = [{"step": 0}, *complete_steps(rng, 1), fruitless_record(rng, 2), *complete_steps(rng, 3)[2:]]
    assert "ended early" not in tiles_of(records, steps="3")["Progress"].text
    assert "The run ended early at step 2 and was resumed later: no group had both" in notes(run_of(records))


def test_what_was_dropped_adds_up_over_the_steps_that_count_it(rng: np.random.Generator) -> None:
    records = complete_steps(rng, 6)
    older = {name: value for name, value in records[0]["sampling"].items() if "dropped" not in name}
    records[0]["sampling"] = older
    made = tiles_of(records)["Dropped by dynamic sampling"]
    for figure, name in zip(made.figures, ("samples", "unique_tokens"), strict=True):
        lost, whole = (sum(r["sampling"][f"{name}{end}"] for r in records[1:]) for end in ("_dropped", ""))
        assert figure.value == f"{lost:,}"
        assert figure.details[0].startswith(f"{100 * lost / whole:.1f}% ")
    assert "Dropped by dynamic sampling" not in tiles_of(records[:1])
