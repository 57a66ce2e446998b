"""examples/simulator.py: its table and its figure against the simulations themselves."""

import statistics
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "simulator.py"


@pytest.fixture(scope="module")
def simulator() -> ModuleType:
    spec = spec_from_file_location("simulator", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(simulator: ModuleType) -> Any:
    settings = {"vocabulary_size": 300, "num_correct": 60, "steps": 25, "record_every": 10, "learning_rate": 0.02}
    return simulator.simulate_all([50, 3, 1200], [5, 6, 7], **settings)


def test_a_curve_is_the_mean_and_standard_deviation_over_the_seeds(simulator: ModuleType, results: Any) -> None:
    assert list(results) == [3, 50, 1200]
    for of_seeds in results.values():
        for quantity in simulator.PANELS:
            runs = [getattr(result, quantity).tolist() for result in of_seeds]
            mean_S, spread_S = simulator.curve(of_seeds, quantity)
            assert mean_S == pytest.approx([statistics.mean(v) for v in zip(*runs, strict=True)], rel=1e-12)
            spread = [statistics.stdev(v) for v in zip(*runs, strict=True)]
            assert spread_S == pytest.approx(spread, rel=1e-9, abs=1e-15)
            assert not simulator.curve(of_seeds[:1], quantity)[1].any()


def test_the_tables_show_the_ends_and_the_mean_terms(
    simulator: ModuleType, results: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    simulator.print_ends(results)
    simulator.print_terms(results)
    ends, terms = (part.splitlines()[1:] for part in capsys.readouterr().out.split("\n\n"))
    for end, term, (number, of_seeds) in zip(ends, terms, results.items(), strict=True):
        mass, improved = ([getattr(r, name)[-1] for r in of_seeds] for name in ("correct_mass", "fraction_improved"))
        cells = end.replace("±", "").split()
        assert cells[:3] == [f"{number:,}", f"{of_seeds[0].correct_mass[0]:.4f}", f"{statistics.mean(mass):.4f}"]
        assert cells[4:6] == [f"{100 * statistics.mean(improved):.1f}", f"{100 * statistics.stdev(improved):.1f}"]
        total = statistics.mean(r.first_step.total for r in of_seeds)
        assert (term.split()[0], term.split()[-1]) == (f"{number:,}", f"{total:+.1e}")


def test_the_figure_has_a_line_for_every_n_in_every_panel(simulator: ModuleType, results: Any) -> None:
    figure = simulator.draw(results)
    for panel, (quantity, (_, _, scale)) in zip(figure.axes, simulator.PANELS.items(), strict=True):
        assert [line.get_label() for line in panel.lines] == ["N = 3", "N = 50", "N = 1,200"]
        for line, band, of_seeds in zip(panel.lines, panel.collections, results.values(), strict=True):
            mean_S, spread_S = simulator.curve(of_seeds, quantity)
            assert np.array_equal(line.get_xdata(), [0, 10, 20, 25])
            assert np.array_equal(line.get_ydata(), scale * mean_S)
            low_S, high_S = scale * (mean_S - spread_S), scale * (mean_S + spread_S)
            corners = band.get_paths()[0].vertices.tolist()
            for corner in [*zip(line.get_xdata(), low_S, strict=True), *zip(line.get_xdata(), high_S, strict=True)]:
                assert list(corner) in corners


@pytest.mark.example
def test_its_command_writes_the_figure(tmp_path: Path) -> None:
    arguments = ("rollouts=4,512", "steps=50", "anchor=correct", "learning_rate=1e-2")
    done = subprocess.run([sys.executable, SCRIPT, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:3]] == [["4", "0.6301"], ["512", "0.6301"]]
    assert (tmp_path / "simulator.png").stat().st_size > 10_000
