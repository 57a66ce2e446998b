"""The figure of a race shows the scores of the standings, and which arms were dropped."""

import numpy as np
from matplotlib.axes import Axes

from brorl.tuning.answer import make_race_figure
from brorl.tuning.spec import RUNGS, Standing


def random_race(rng: np.random.Generator) -> list[list[Standing]]:

    def rung(names: str, dropped: str) -> list[Standing]:
        return [Standing(n, float(rng.random()), "no room" if n in dropped else None) for n in names]

    return [rung("abcd", "cd"), rung("ab", "b"), rung("a", "")]


def test_the_lines_are_the_scores_at_the_rungs(rng: np.random.Generator) -> None:
    race = random_race(rng)
    axis: Axes
    (axis,) = make_race_figure(race, 0.1, 40.0, "pass@1").axes
    lines = {str(line.get_label()): line for line in axis.lines if line.get_label() in tuple("abcd")}
    for name, line in lines.items():
        scores = [s.score for rung in race for s in rung if s.arm == name]
        assert np.asarray(line.get_ydata()).tolist() == [0.1, *scores]
        assert np.asarray(line.get_xdata()).tolist() == [0.0, *(40.0 * f for f in RUNGS[: len(scores)])]
    assert sorted(lines) == list("abcd")
    crosses = [line for line in axis.lines if line.get_marker() == "x"]
    ends = [s.score for rung in race for s in rung if s.dropped]
    assert sorted(float(np.asarray(line.get_ydata())[0]) for line in crosses) == sorted(ends)
    texts = {text.get_text() for text in axis.texts}
    assert {f"{s.arm}  {s.score:.3f} dropped" for rung in race for s in rung if s.dropped} <= texts
