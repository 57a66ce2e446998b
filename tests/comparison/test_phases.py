"""Phases of an arm's objective in a comparison: when they began, in words and in the figure."""

import re
from dataclasses import replace

import numpy as np
import pytest
from comparisons import arm_of, comparison_of, figure_of, run_of, score_of

from brorl.comparison.results import results_of
from brorl.comparison.tables import cost_table
from brorl.cost import Cost

TITLE = "sharpen (phase 2 of 2, grpo)"


def test_begins_are_means_over_runs_and_drawn_on_the_line(rng: np.random.Generator) -> None:
    begins_S, points = rng.uniform(2, 9, 3), (5.0, 10.0)
    arms = []
    for name, n in (("A", 16), ("B", 512)):
        runs = [
            run_of(seed, [score_of(Cost(int(p), p, int(p), 0, 0), rng.integers(0, 9, 20)) for p in (0.0, *points)])
            for seed in range(3)
        ]
        if name == "B":
            runs = [
                replace(r, phase_begins={TITLE: Cost(seconds=float(b))}) for r, b in zip(runs, begins_S, strict=True)
            ]
        arms.append(arm_of(name, runs, n))
    comparison = comparison_of(arms, points, 8)
    assert arms[0].phase_begins("seconds") == {}
    assert arms[1].phase_begins("seconds") == {TITLE: pytest.approx(begins_S.mean())}
    said = [note for note in cost_table(results_of(comparison)).notes if TITLE in note]
    assert len(said) == 1
    shown = re.fullmatch(rf"In B, {re.escape(TITLE)} began after (\S+) seconds on average\.", said[0])
    assert shown is not None
    assert float(shown[1]) == pytest.approx(begins_S.mean(), abs=0.051)

    (axis, *_) = figure_of(comparison).axes
    (diamond,) = [line for line in axis.get_lines() if line.get_marker() == "D"]
    mean_M = [np.mean([run.scores[i].num_correct_P / 8 for run in arms[1].runs]) for i in range(3)]
    assert diamond.get_xdata()[0] == pytest.approx(begins_S.mean())
    assert diamond.get_ydata()[0] == pytest.approx(np.interp(begins_S.mean(), (0.0, *points), mean_M))
