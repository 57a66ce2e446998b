"""The words and tables of a sweep name the best arm of each budget, and say where nothing can be told."""

from dataclasses import replace

import numpy as np
import pytest
from comparisons import findings, levels, synthetic, templates, values_of

from brorl.comparison import findings as f
from brorl.comparison.answer import comparison_record
from brorl.comparison.results import results_of
from brorl.comparison.tables import frontier_table, tables_of

# without chance: N = 16 is best at two budgets, N = 64 at two, N = 256 at two
RISE = ([8, 9, 9, 9, 9, 9], [6, 8, 12, 14, 14, 14], [5, 6, 8, 11, 20, 22])


def test_the_answer_of_a_sweep_is_its_best_arm() -> None:
    found = findings(levels(RISE, numbers=(16, 64, 256)))
    best = values_of(f.BEST_WON, found)
    assert (best["arm"], best["second"], best["budget"], best["seeds"]) == ("N=256", "N=64", "320 seconds", "3 seeds")
    assert best["score"] == "0.703 [0.517, 0.782]"
    assert best["lead"].value == pytest.approx(8 / 32)
    assert values_of(f.COVERS, found)["covers"] == "other prompts and other seeds"


def test_the_sentence_of_a_sweep_names_the_best_arm_its_score_and_its_lead() -> None:
    answer = str(findings(levels(RISE, numbers=(16, 64, 256)))[0])
    assert answer.startswith("N=256 won: ")
    for part in ("320 seconds of training each", "0.703 [0.517, 0.782]", "N=64", "+0.250 [+0.184, +0.316]", "3 seeds"):
        assert part in answer


def test_arms_of_one_score_are_tied() -> None:
    found = findings(levels([[8, 9], [8, 9], [7, 7]], numbers=(16, 64, 256), num_seeds=1))
    tied = values_of(f.TIED, found)
    assert (tied["arm"], tied["second"], tied["budget"]) == ("N=16", "N=64", "20 seconds")
    assert f.ONE_SEED in templates(found)


def test_a_lead_with_one_seed_says_so() -> None:
    found = findings(levels(RISE, numbers=(16, 64, 256), num_seeds=1))
    assert values_of(f.BEST_WON_WITH_ONE_SEED, found)["seeds"] == "1 seed"


@pytest.mark.parametrize(("over", "template"), [((1, 2), f.ONE_ARM_LEFT), ((0, 1, 2), f.NO_ARM_LEFT)])
def test_fewer_than_two_matched_arms_have_no_best(
    over: tuple[int, ...], template: str, rng: np.random.Generator
) -> None:
    found = findings(synthetic(rng, numbers=(16, 64, 512), overshoot=dict.fromkeys(over, 0.2)))
    assert found[0].template == template
    assert found[0].values.get("arm", "N=16") == "N=16"
    assert str(found[0])


def test_a_lead_that_is_not_shown_did_not_win(rng: np.random.Generator) -> None:
    """Of two arms with the same pass rates but for chance; one lead in 20 or so is shown nevertheless."""
    lift = {0: 1.0, 1: 1.0, 2: -1.0}
    found = (synthetic(rng, numbers=(16, 64, 512), lift=lift, num_prompts=12, num_seeds=2) for _ in range(50))
    comparison, best = next(
        (comparison, best)
        for comparison in found
        for best in results_of(comparison).best[1]
        if best.eval_point == comparison.budget and not (best.lead_shown or best.is_tied)
    )
    answer = values_of(f.NO_WINNER, findings(comparison))
    assert (answer["arm"], answer["second"], answer["lead"]) == (best.arm, best.second, best.lead)


def test_a_tie_has_no_best_arm() -> None:
    comparison = levels([[8, 9], [8, 12], [7, 7]], numbers=(16, 64, 256), num_seeds=1)
    found = results_of(comparison)
    assert found.best[1][0].arm == "N=16"  # the first of two equal ones
    rows = frontier_table(found, 1).rows
    assert [cell.count("*") for cell in rows[0]] == [0, 0, 0, 0]
    assert rows[1][2].endswith("*")


def test_long_names_become_letters_with_a_key(rng: np.random.Generator) -> None:
    names = [f"learning_rate={rate}, mini_batches=4" for rate in (1e-6, 3e-6, 1e-5)]
    comparison = synthetic(rng, numbers=(64, 64, 64), names=names, num_prompts=10)
    arms = [
        replace(arm, differs={"optimizer.learning_rate": "1", "kl.coefficient": str(i)})
        for i, arm in enumerate(comparison.arms)
    ]
    comparison = replace(comparison, arms=tuple(arms))
    found = findings(comparison)
    assert found[1].template == f.LETTERS
    assert str(found[1]) == f"A is {names[0]}; B is {names[1]}; C is {names[2]}."
    assert not any("learning_rate=" in str(finding) for finding in (found[0], *found[2:]))
    assert values_of(f.SEVERAL_SETTINGS, found)["settings"] == "kl.coefficient and optimizer.learning_rate"
    first = tables_of(results_of(comparison))[1]
    assert first.title == "Settings in which the arms differ"
    assert first.rows == tuple(
        (letter, f"recipe: {name}, optimizer.learning_rate: 1, kl.coefficient: {i}")
        for i, (letter, name) in enumerate(zip("ABC", names, strict=True))
    )
    values = ("1e-06", "3e-06", "1e-05")
    arms = [
        replace(arm, differs={"optimizer.learning_rate": value, "optimizer.mini_batches": "4"})
        for arm, value in zip(arms, values, strict=True)
    ]
    told = tables_of(results_of(replace(comparison, arms=tuple(arms))))[1]  # the titles say no more than the settings
    assert told.columns == ("setting", "A", "B", "C")
    assert told.rows == (("optimizer.learning_rate", *values), ("optimizer.mini_batches", "4", "4", "4"))
    record = comparison_record(results_of(comparison))
    assert [(arm["title"], arm["name"]) for arm in record["arms"]] == list(zip(names, "ABC", strict=True))
    assert set(record["prompts"][0]["arms"]) == set("ABC")


def test_the_best_arm_of_each_budget_is_marked() -> None:
    found = results_of(levels(RISE, numbers=(16, 64, 256)))
    rows = frontier_table(found, 1).rows
    assert [row[0] for row in rows] == ["10 s", "20 s", "40 s", "80 s", "160 s", "320 s"]
    for eval_point, row in enumerate(rows):
        best = max(range(3), key=lambda a: RISE[a][eval_point])
        for a in range(3):
            assert row[1 + a] == f"{(RISE[a][eval_point] + 0.5) / 32:.3f}{'**' if a == best else ''}"
    assert [best.arm for best in found.best[1]] == ["N=16"] * 2 + ["N=64"] * 2 + ["N=256"] * 2
