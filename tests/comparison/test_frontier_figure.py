"""The frontier's figure and words show the scores and the best of them, and say where nothing can be told."""

import json
from dataclasses import replace
from math import comb
from pathlib import Path

import numpy as np
import pytest
from comparisons import levels, score_SP, sentences, synthetic
from matplotlib.axes import Axes
from matplotlib.image import imread

from brorl.comparison.arms import PASS_1, Comparison, Measure
from brorl.comparison.axes import PNG, arm_colors
from brorl.comparison.frontier import frontier
from brorl.comparison.frontier_figure import make_frontier_figure, rows_of
from brorl.comparison.report import comparison_record
from brorl.comparison.results import results_of
from brorl.comparison.tables import best_table, frontier_table, tables_of
from brorl.comparison.text import sentences_of
from brorl.format import signed

# without chance: N = 16 is best at two budgets, N = 64 at two, N = 256 at two
RISE = ([8, 9, 9, 9, 9, 9], [6, 8, 12, 14, 14, 14], [5, 6, 8, 11, 20, 22])


def rising(**changes: object) -> Comparison:
    return levels(RISE, numbers=(16, 64, 256), **changes)  # type: ignore[arg-type]


def lines(axis: Axes, **wanted: object) -> list[object]:
    return [line for line in axis.get_lines() if all(getattr(line, f"get_{n}")() == v for n, v in wanted.items())]


def test_panels_draw_scores_and_the_best(rng: np.random.Generator) -> None:
    comparison = synthetic(rng, numbers=(16, 64, 512), eval_points=(10.0, 20.0, 40.0, 80.0))
    axes = np.array(make_frontier_figure(results_of(comparison)).axes).reshape(2, 3)
    n = comparison.num_samples
    colors = arm_colors(comparison)
    for column, measure in enumerate((PASS_1, Measure(16), Measure(16, worst=True))):
        top, bottom = axes[:, column]
        score_AM = []
        for arm in comparison.arms:
            k = measure.k
            if measure.worst:  # one less the pass@k of what is incorrect
                counts = np.round(n * np.stack([score_SP(comparison, arm, m) for m in comparison.eval_points])).astype(
                    int
                )
                expected = [np.mean([comb(int(c), k) / comb(n, k) for c in at.ravel()]) for at in counts]
            else:
                expected = [score_SP(comparison, arm, m, k).mean() for m in comparison.eval_points]
            (line,) = lines(top, label=arm.name)
            np.testing.assert_allclose(line.get_xdata(), comparison.eval_points)
            np.testing.assert_allclose(line.get_ydata(), expected, atol=1e-12)
            score_AM.append(expected)
        (envelope,) = lines(top, gid="frontier")
        np.testing.assert_allclose(envelope.get_ydata(), np.max(score_AM, axis=0), atol=1e-12)
        assert top.get_xscale() == "log"
        (best,) = lines(bottom, gid="best")
        for eval_point, place in enumerate(best.get_ydata()):
            (winner,) = [i for i, arm in enumerate(comparison.arms) if np.log2(arm.num_rollouts) == place]
            assert score_AM[winner][eval_point] == pytest.approx(max(row[eval_point] for row in score_AM), abs=1e-12)
        told = frontier(comparison, measure)
        dots = [line for line in bottom.get_lines() if line.get_markersize() == 8.5]
        assert [line.get_markerfacecolor() != "white" for line in dots] == [b.lead_shown for b in told.best]
        assert [line.get_markeredgecolor() for line in dots] == [colors[b.arm] for b in told.best]
        assert [float(line.get_ydata()[0]) for line in dots] == [np.log2(b.num_rollouts) for b in told.best]


def test_a_shown_lead_is_filled() -> None:
    axes = make_frontier_figure(results_of(rising())).axes
    found = results_of(rising()).frontiers[0]
    rings = [line for line in axes[0].get_lines() if line.get_markersize() == 8.5]
    assert len(rings) == len(found.best) == 6
    for ring, best in zip(rings, found.best, strict=True):
        assert best.lead_shown  # every prompt of every run agrees
        assert ring.get_markerfacecolor() != "white"
    same = make_frontier_figure(results_of(levels([[8, 9]] * 3, numbers=(16, 64, 256)))).axes[0]
    assert all(ring.get_markerfacecolor() == "white" for ring in same.get_lines() if ring.get_markersize() == 8.5)


def test_an_arm_that_overshot_is_crossed_out(rng: np.random.Generator) -> None:
    comparison = synthetic(rng, numbers=(16, 64, 512), lift={0: 0.0, 1: 0.5, 2: 4.0}, overshoot={2: 0.2})
    figure = make_frontier_figure(results_of(comparison))
    top = figure.axes[0]
    (line,) = lines(top, label="N=512")
    assert np.isnan(line.get_ydata()).all()
    (crosses,) = lines(top, marker="x")
    expected = [score_SP(comparison, comparison.arms[2], eval_point).mean() for eval_point in comparison.eval_points]
    np.testing.assert_allclose(crosses.get_ydata(), expected, atol=1e-12)
    (best,) = lines(figure.axes[3], gid="best")
    assert max(best.get_ydata()) <= 6
    assert any("not compared" in text.get_text() for text in figure.legends[0].get_texts())
    words = sentences(comparison)
    assert ": of the arms that kept to 40 seconds (N=512 did not), N=64 scored the highest pass@1, " in words[0]
    assert any(line.startswith("NOT compute-matched: N=512 spent up to 48 seconds, 20% more") for line in words)
    assert any("overshot by over 5%: N=512 at 10 s and 20 s." in line for line in words)
    assert not any("Compute-matched" in line for line in words)
    table = frontier_table(results_of(comparison).frontiers[0], results_of(comparison))
    assert all(row[3].startswith("(") for row in table.rows)


def test_places_of_arms(rng: np.random.Generator) -> None:
    comparison = synthetic(rng, numbers=(16, 128, 64), num_prompts=4, num_seeds=1)
    places, words = rows_of(comparison)
    assert places == {"N=16": 4.0, "N=128": 7.0, "N=64": 6.0}
    assert words == {"N=16": "16", "N=128": "128", "N=64": "64"}
    comparison = synthetic(rng, numbers=(64, 64, 64), names="abc", num_prompts=4, num_seeds=1)
    assert rows_of(comparison)[0] == {"a": 0.0, "b": 1.0, "c": 2.0}


def test_arms_of_one_n_are_named_not_ordered() -> None:
    comparison = levels(RISE, numbers=(64, 64, 64), names=("grpo", "dapo", "a third"), ks=(1,))
    figure = make_frontier_figure(results_of(comparison))
    assert len(figure.axes) == 2  # pass@1 alone
    bottom = figure.axes[1]
    assert [label.get_text() for label in bottom.get_yticklabels()] == ["grpo", "dapo", "a third"]
    assert bottom.get_ylabel() == "best arm"
    assert not any("best N" in line for line in sentences(comparison))


def test_png_and_refusal(rng: np.random.Generator, tmp_path: Path) -> None:
    make_frontier_figure(results_of(rising(ks=(1,)))).savefig(tmp_path / "frontier.png", **PNG)
    pixels = imread(tmp_path / "frontier.png")
    assert pixels[0, 0, :3].tolist() == [1, 1, 1]
    assert pixels[..., :3].std() > 0.05
    with pytest.raises(ValueError, match="at least three arms, got 2"):
        make_frontier_figure(results_of(synthetic(rng, num_prompts=4)))


def test_words_of_a_sweep() -> None:
    words = sentences(rising())
    assert words[0] == (
        "N=256 won: at 320 seconds of training each, N=256 scored the highest pass@1, 0.703 [0.693, 0.713], 0.250 "
        "higher than N=64, interval [+0.250, +0.250], 3 seeds."
    )
    assert any(
        line.startswith("3 seeds an arm: intervals (95%) allow for other prompts and other seeds") for line in words
    )


def test_words_when_nothing_is_shown() -> None:
    words = sentences(levels([[8, 9], [8, 9], [7, 7]], numbers=(16, 64, 256), num_seeds=1))
    assert words[0].startswith("At 20 seconds of training each, N=16 and N=64 scored the same pass@1, ")
    assert any(line.startswith("1 seed an arm: with one") and "reverse" in line for line in words)


def test_a_lead_that_is_not_shown_did_not_win(rng: np.random.Generator) -> None:
    """Of two arms with the same pass rates but for chance; one lead in 20 or so is shown nevertheless."""
    lift = {0: 1.0, 1: 1.0, 2: -1.0}
    found = (synthetic(rng, numbers=(16, 64, 512), lift=lift, num_prompts=12, num_seeds=2) for _ in range(50))
    comparison, best = next(
        (comparison, best)
        for comparison in found
        for best in results_of(comparison).frontiers[0].best
        if best.eval_point == comparison.budget and not (best.lead_shown or best.is_tied)
    )
    said, ends = sentences(comparison)[0], signed(best.lead).partition(" ")[2]
    assert said.startswith(f"No winner shown: at 40 seconds of training each, {best.arm} scored the highest pass@1, ")
    assert f"{best.lead.value:.3f} higher than {best.second}, interval {ends}, 2 seeds." in said


def test_a_tie_has_no_best_arm() -> None:
    comparison = levels([[8, 9], [8, 12], [7, 7]], numbers=(16, 64, 256), num_seeds=1)
    found = results_of(comparison)
    assert found.frontiers[0].best[0].arm == "N=16"  # the first of two equal ones
    axes = make_frontier_figure(results_of(comparison)).axes
    rings = [line for line in axes[0].get_lines() if line.get_markersize() == 8.5]
    assert [float(ring.get_xdata()[0]) for ring in rings] == [20.0]
    (best,) = lines(axes[3], gid="best")
    assert np.isnan(best.get_ydata()).tolist() == [True, False]
    rows = frontier_table(found.frontiers[0], found).rows
    assert [cell.count("*") for cell in rows[0]] == [0, 0, 0, 0]
    assert rows[1][2].endswith("*")


@pytest.mark.slow
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
    texts = [text.get_text() for text in make_frontier_figure(results_of(comparison)).legends[0].get_texts()]
    assert [text for text in texts if "learning_rate" in text] == [
        f"{'ABC'[i]}: {name}" for i, name in enumerate(names)
    ]
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
    assert record["arms"][1]["efficiency"][0]["arm"] == "B"
    assert set(record["prompts"][0]["arms"]) == set("ABC")


def test_tables_of_a_sweep() -> None:
    comparison = rising()
    found = results_of(comparison)
    rows = frontier_table(found.frontiers[0], found).rows
    assert [row[0] for row in rows] == ["10 s", "20 s", "40 s", "80 s", "160 s", "320 s"]
    for eval_point, row in enumerate(rows):
        best = max(range(3), key=lambda a: RISE[a][eval_point])
        for a in range(3):
            assert row[1 + a] == f"{(RISE[a][eval_point] + 0.5) / 32:.3f}{'**' if a == best else ''}"
    rows = best_table(found.frontiers[0], found).rows
    assert [row[1] for row in rows] == ["N=16"] * 2 + ["N=64"] * 2 + ["N=256"] * 2
    assert rows[-1][-1] == "+0.250 [+0.250, +0.250]"
    titles = [str(table.title) for table in tables_of(results_of(comparison))]
    assert "pass@1 by budget" in titles
    assert "worst@16 by budget" in titles


@pytest.mark.parametrize(
    "changes",
    [
        {"eval_points": (40.0,)},
        pytest.param({"overshoot": {0: 0.2, 1: 0.2, 2: 0.2}}, marks=pytest.mark.slow),
        {"num_seeds": 1, "num_prompts": 2, "num_tasks": 2},
        pytest.param({"ks": (2, 8), "num_prompts": 6}, marks=pytest.mark.slow),
        {"ended_early": {(0, 0): 0, (1, 1): 1}},
    ],
)  # fmt: skip
def test_odd_sweeps_are_told_and_drawn(rng: np.random.Generator, changes: dict[str, object]) -> None:
    comparison = synthetic(rng, **{"numbers": (16, 64, 256), "num_prompts": 12, **changes})  # type: ignore[arg-type]
    words = sentences(comparison)
    assert "nan" not in " ".join(words)
    assert ("nothing can be compared" in words[0]) == ("overshoot" in changes)
    titles = [str(table.title) for table in tables_of(results_of(comparison))]
    assert any(title.startswith("The best arm") for title in titles) == ("overshoot" not in changes)
    assert json.loads(json.dumps(comparison_record(results_of(comparison)), allow_nan=False))["caveats"] == words[1:]
    assert tables_of(results_of(comparison))
    figure = make_frontier_figure(results_of(comparison))
    if "eval_points" in changes:  # a logarithmic axis with a single evaluation point
        figure.draw_without_rendering()
