"""Files, figure and table of simulations: each against the results themselves."""

import io
import json
import statistics
from dataclasses import asdict, replace

import numpy as np
import pytest
from rich.console import Console

import brorl
from brorl.api.simulate import curves, draw_figure, end_point_table, terms_table, to_json
from brorl.theory.simulator import SimulationResult, SimulationSettings, simulate

QUANTITIES = ("correct_mass", "fraction_improved", "worst_drop")


@pytest.fixture
def results(rng: np.random.Generator) -> list[SimulationResult]:
    """Three N, three seeds, in no order."""
    settings = SimulationSettings(vocabulary_size=300, num_correct=60, steps=25, record_every=10, learning_rate=0.02)
    seeds = rng.choice(1 << 30, 3, replace=False).tolist()
    return [simulate(replace(settings, rollouts=n, seed=s)) for s in seeds for n in (50, 3, 1200)]


@pytest.mark.parametrize("seeds", [2, 3])
def test_curves_are_mean_and_standard_deviation_over_seeds(results: list[SimulationResult], seeds: int) -> None:
    some = results[: 3 * seeds]
    for quantity in QUANTITIES:
        found = curves(some, quantity)
        assert list(found) == [3, 50, 1200]
        for rollouts, curve in found.items():
            runs = [getattr(r, quantity).tolist() for r in some if r.settings.rollouts == rollouts]
            assert curve.mean == pytest.approx([statistics.mean(v) for v in zip(*runs, strict=True)], rel=1e-12)
            spread = [statistics.stdev(v) for v in zip(*runs, strict=True)]
            assert curve.spread == pytest.approx(spread, rel=1e-9, abs=1e-15)
    assert not curves(results[:3], "correct_mass")[50].spread.any()  # one seed has none


def test_json_holds_the_results(results: list[SimulationResult]) -> None:
    content = json.loads(json.dumps(to_json(results)))
    assert content["brorl_version"] == brorl.__version__
    assert content["settings"]["weight_decay"] == 0.01  # the default, resolved
    shared = {k: v for k, v in content["settings"].items() if k != "weight_decay"}
    for run, result in zip(content["runs"], results, strict=True):
        settings = SimulationSettings(rollouts=run["rollouts"], seed=run["seed"], **shared)
        assert settings == result.settings
        for name in ("step", *QUANTITIES):
            assert run[name] == getattr(result, name).tolist()
        assert result.first_step is not None
        assert run["first_step"] == asdict(result.first_step)


def test_terms_are_means_over_seeds(results: list[SimulationResult]) -> None:
    table = terms_table(results)
    assert table is not None
    assert [row[0] for row in table.rows] == ["3", "50", "1,200"]
    for row, rollouts in zip(table.rows, (3, 50, 1200), strict=True):
        sums = [r.first_step.total for r in results if r.settings.rollouts == rollouts and r.first_step]
        assert row[4] == f"{statistics.mean(sums):+.1e}"
        assert sum(map(float, row[1:4])) == pytest.approx(float(row[4]), rel=0.2, abs=0.11 * abs(float(row[1])))
    assert terms_table([replace(results[0], first_step=None)]) is None


def test_figure_has_a_line_for_every_n_in_every_panel(results: list[SimulationResult]) -> None:
    figure = draw_figure(results)
    assert len(figure.axes) == 3
    for panel, quantity, scale in zip(figure.axes, QUANTITIES, (1, 100, 1), strict=True):
        lines = {line.get_label(): line for line in panel.lines if str(line.get_label()).startswith("N = ")}
        assert list(lines) == ["N = 3", "N = 50", "N = 1,200"]
        assert len({line.get_color() for line in lines.values()}) == 3
        for line, curve in zip(lines.values(), curves(results, quantity).values(), strict=True):
            assert np.array_equal(line.get_xdata(), [0, 10, 20, 25])
            assert np.array_equal(line.get_ydata(), scale * curve.mean)
        assert panel.get_xlabel() == "gradient step"
        assert panel.get_ylabel()
        assert panel.get_title()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["N = 3", "N = 50", "N = 1,200"]
    assert any(line.get_linestyle() == ":" for line in figure.axes[0].lines)  # the start
    bands = figure.axes[0].collections
    for band, curve in zip(bands, curves(results, "correct_mass").values(), strict=True):
        edges = {(x, y) for x, y in band.get_paths()[0].vertices.tolist()}
        for step, mean, spread in zip((0, 10, 20, 25), curve.mean, curve.spread, strict=True):
            assert {(step, mean - spread), (step, mean + spread)} <= edges
    assert not draw_figure(results[:3]).axes[0].collections


def test_table_shows_start_and_end_on_a_narrow_console(results: list[SimulationResult]) -> None:
    def shown(some: list[SimulationResult]) -> str:
        console = Console(file=io.StringIO(), width=80)
        console.print(end_point_table(some))
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    text = shown(results)
    assert "…" not in text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()[:1].isdigit()}
    assert list(rows) == ["3", "50", "1,200"]
    mass, improved = curves(results, "correct_mass"), curves(results, "fraction_improved")
    for row, at in zip(rows.values(), mass, strict=True):
        ends = [f"{mass[at].mean[-1]:.4f}", "±", f"{mass[at].spread[-1]:.0e}"]
        change = f"{mass[at].mean[-1] - mass[at].mean[0]:+.4f}"
        better = [f"{100 * improved[at].mean[-1]:.1f}", "±", f"{100 * improved[at].spread[-1]:.1f}"]
        assert row[:8] == [f"{mass[at].mean[0]:.4f}", *ends, change, *better]
    drop = curves(results, "worst_drop")[3]
    worst = f"{drop.mean[-1]:.1e} ± {drop.spread[-1]:.0e}" if drop.mean[-1] else " 0 "  # in a few draws none falls
    assert worst in text
    assert "±" not in shown(results[:3])
    lone = replace(results[0], worst_drop=np.zeros(4))
    assert shown([lone]).splitlines()[-1].split()[-1] == "0"
