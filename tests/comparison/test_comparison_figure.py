"""The figure of a comparison draws the means that plain loops give."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from comparisons import evaluation_at, figure_of, findings, score_SP, synthetic, templates
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from brorl.comparison import findings as f
from brorl.comparison.answer import comparison_record
from brorl.comparison.figure import arm_colors
from brorl.comparison.findings import caveats_of, sentences
from brorl.comparison.results import results_of
from brorl.comparison.scores import Arm, Comparison
from brorl.comparison.tables import paired_table, tables_of


def panels(figure: Figure) -> list[Axes]:
    return [axis for axis in figure.get_axes() if axis.axison]


def line_of(axis: Axes, name: str) -> tuple[np.ndarray, np.ndarray]:
    (line,) = [line for line in axis.get_lines() if line.get_label() == name]
    return np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)


def means(comparison: Comparison, arm: Arm, k: int) -> list[float]:
    return [float(score_SP(comparison, arm, point, k).mean()) for point in (0.0, *comparison.eval_points)]


@pytest.mark.parametrize("numbers", [(16, 512), pytest.param((16, 64, 256, 1024, 4096), marks=pytest.mark.slow)])
def test_lines_are_the_means(rng: np.random.Generator, numbers: tuple[int, ...]) -> None:
    comparison = synthetic(rng, numbers=numbers, num_prompts=30)
    figure = figure_of(comparison)
    axes = panels(figure)
    assert len(axes) == 6
    for arm in comparison.arms:
        for axis, k in zip(axes[:2], (1, 16), strict=True):
            x, y = line_of(axis, arm.name)
            np.testing.assert_allclose(x, [0.0, 10.0, 20.0, 40.0])
            np.testing.assert_allclose(y, means(comparison, arm, k), atol=1e-12)
        for axis, unit in zip(axes[2:5], ("steps", "samples", "unique_tokens"), strict=True):
            x, y = line_of(axis, arm.name)
            spent = [
                [getattr(evaluation_at(comparison, arm, run, eval_point).cost, unit) for run in range(3)]
                for eval_point in (0.0, *comparison.eval_points)
            ]
            np.testing.assert_allclose(x, np.mean(spent, 1))
            np.testing.assert_allclose(y, means(comparison, arm, 1), atol=1e-12)
        x, y = line_of(axes[5], arm.name)
        np.testing.assert_allclose(x, means(comparison, arm, 1), atol=1e-12)
        np.testing.assert_allclose(y, means(comparison, arm, 16), atol=1e-12)
    title = " ".join(figure._suptitle.get_text().split())
    assert title == str(findings(comparison)[0])


@pytest.mark.slow
def test_bands_are_the_range_of_seeds(rng: np.random.Generator) -> None:
    comparison = synthetic(rng, num_sources=1)
    axis = panels(figure_of(comparison))[0]
    assert len(axis.collections) == 2
    for band, arm in zip(axis.collections, comparison.arms, strict=True):
        ends = band.get_paths()[0].vertices
        for eval_point in comparison.eval_points:
            of_runs = score_SP(comparison, arm, eval_point).mean(1)
            at_mark = ends[np.isclose(ends[:, 0], eval_point), 1]
            assert (at_mark.min(), at_mark.max()) == pytest.approx((of_runs.min(), of_runs.max()), abs=1e-12)
    assert "mean of 3 seeds, band: their range" in axis.get_title(loc="left")
    alone = panels(figure_of(synthetic(rng, num_sources=1, num_seeds=1)))[0]
    assert not alone.collections
    assert "one seed" in alone.get_title(loc="left")


def test_an_overshoot_stands_where_it_was_spent_and_an_early_ending_at_the_mark(rng: np.random.Generator) -> None:
    comparison = synthetic(rng, num_sources=1, num_seeds=2, overshoot={1: 0.25}, ended_early={(0, 0): 1, (0, 1): 1})
    axis = panels(figure_of(comparison))[0]
    np.testing.assert_allclose(line_of(axis, "N=512")[0], [0.0, 12.5, 25.0, 50.0])
    x, y = line_of(axis, "N=16")
    np.testing.assert_allclose(x, [0.0, 10.0, 20.0, 40.0])
    assert y[1] == y[2] == y[3]


def test_long_names_become_letters_with_a_key(rng: np.random.Generator) -> None:
    names = ("learning_rate=1e-06, mini_batches=4", "learning_rate=3e-06, mini_batches=1")
    figure = figure_of(synthetic(rng, names=names, num_sources=1, num_prompts=10))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [f"A: {names[0]}", f"B: {names[1]}"]
    colors = [handle.get_color() for handle in figure.legends[0].legend_handles]
    axis = panels(figure)[0]
    assert colors == [line.get_color() for line in axis.get_lines() if line.get_label() in ("A", "B")]
    assert figure._suptitle.get_text().startswith("B won: ")


def test_colors_follow_n(rng: np.random.Generator) -> None:
    comparison = synthetic(rng, numbers=(512, 256, 16, 64), num_seeds=1, num_prompts=4)
    colors = arm_colors(comparison)
    assert len(set(colors.values())) == 4
    light = [sum(int(colors[f"N={n}"][i : i + 2], 16) for i in (1, 3, 5)) for n in (16, 64, 256, 512)]
    assert light == sorted(light, reverse=True)
    alike = synthetic(rng, numbers=(64,) * 8, names="abcdefgh", num_seeds=1, num_prompts=4)
    assert len(set(arm_colors(alike).values())) == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"eval_points": (40.0,), "ks": (1,)},
        pytest.param({"overshoot": {0: 0.2, 1: 0.2}}, marks=pytest.mark.slow),
        pytest.param({"num_seeds": 1, "num_prompts": 2, "num_sources": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"ks": (2, 8), "num_prompts": 6, "unit": "samples", "eval_points": (1e5, 2e5)}, marks=pytest.mark.slow
        ),
        pytest.param({"ended_early": {(0, 0): 0, (1, 1): 1}}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("numbers", [(16, 512), pytest.param((16, 64, 256), marks=pytest.mark.slow)])
def test_odd_comparisons_are_told_and_drawn(
    rng: np.random.Generator, numbers: tuple[int, ...], changes: dict[str, Any]
) -> None:
    if "overshoot" in changes:
        changes = {"overshoot": dict.fromkeys(range(len(numbers)), 0.2)}
    comparison = synthetic(rng, **{"numbers": numbers, "num_prompts": 12, **changes})
    found, results = findings(comparison), results_of(comparison)
    assert not any("nan" in str(finding) for finding in found)
    assert (found[0].template == f.NO_ARM_LEFT) == ("overshoot" in changes and len(numbers) > 2)
    record = json.loads(json.dumps(comparison_record(results), allow_nan=False))
    assert record["caveats"] == sentences(caveats_of(results))
    assert tables_of(results)
    figure_of(comparison)


@pytest.mark.slow
def test_arms_of_different_seeds_are_compared_too(rng: np.random.Generator) -> None:
    comparison = synthetic(rng, num_sources=2)
    arms = (comparison.arms[0], replace(comparison.arms[1], runs=comparison.arms[1].runs[:2]))
    comparison = replace(comparison, arms=arms)
    found = findings(comparison)
    assert found[0].values["seeds"] == "2 to 3 seeds"
    assert f.SEEDS_AHEAD not in templates(found)
    assert any(row[1] == "3 + 2 seeds" for row in paired_table(results_of(comparison)).rows)
    figure_of(comparison)
