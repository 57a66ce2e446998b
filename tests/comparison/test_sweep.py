"""The words and tables of a sweep name the best arm of each budget, and say where nothing can be told."""

from dataclasses import replace

import numpy as np
from comparisons import levels, sentences, synthetic

from brorl.comparison.answer import comparison_record, sentences_of
from brorl.comparison.results import results_of
from brorl.comparison.tables import frontier_table, tables_of
from brorl.format import signed

# without chance: N = 16 is best at two budgets, N = 64 at two, N = 256 at two
RISE = ([8, 9, 9, 9, 9, 9], [6, 8, 12, 14, 14, 14], [5, 6, 8, 11, 20, 22])


def test_words_of_a_sweep() -> None:
    words = sentences(levels(RISE, numbers=(16, 64, 256)))
    assert words[0] == (
        "N=256 won: at 320 seconds of training each, N=256 scored the highest pass@1, 0.703 [0.517, 0.782], 0.250 "
        "higher than N=64, interval [+0.184, +0.316], 3 seeds."
    )
    assert any(
        line.startswith("3 seeds an arm: intervals (95%) allow for other prompts and other seeds") for line in words
    )


def test_words_when_nothing_is_shown() -> None:
    words = sentences(levels([[8, 9], [8, 9], [7, 7]], numbers=(16, 64, 256), num_seeds=1))
    assert words[0].startswith("At 20 seconds of training each, N=16 and N=64 scored the same pass@1, ")
    assert any(line.startswith("1 seed an arm: ") and "reverse" in line for line in words)


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
    said, ends = sentences(comparison)[0], signed(best.lead).partition(" ")[2]
    assert said.startswith(f"No winner shown: at 40 seconds of training each, {best.arm} scored the highest pass@1, ")
    assert f"{best.lead.value:.3f} higher than {best.second}, interval {ends}, 2 seeds." in said


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
    words = sentences(comparison)
    assert sentences_of(results_of(comparison)) == (
        words[0], f"A is {names[0]}; B is {names[1]}; C is {names[2]}."
    )  # fmt: skip
    assert not any("learning_rate=" in line for line in words)
    assert any(line.startswith("The arms differ in kl.coefficient and optimizer.learning_rate: the") for line in words)
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
