"""Simulations to files, a figure and a table.

In: results of `brorl.theory.simulator.simulate` that differ only in the number of rollouts and in the seed. Out:
`simulation.json` (settings and every record), `simulation.csv` (the same records, one per line), `simulation.png`
(three panels over the steps, as in the paper's Figure 3) and a table of start and end. Files of these names that no
simulation wrote are never replaced.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich import box
from rich.table import Table

import brorl
from brorl.errors import UserError
from brorl.theory.simulator import SimulationResult, SimulationSettings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FloatArray = NDArray[np.float64]

JSON_NAME, CSV_NAME, PNG_NAME = "simulation.json", "simulation.csv", "simulation.png"
_FORMAT = "brorl simulation 1"
_QUANTITIES = ("correct_mass", "fraction_improved", "worst_drop")
_PANELS = (  # quantity, title, label of the axis, scale
    ("correct_mass", "Total mass of the correct tokens", "probability", 1.0),
    ("fraction_improved", "Correct tokens above their start", "% of the correct tokens", 100.0),
    ("worst_drop", "Worst drop of a correct token", "change of probability", 1.0),
)


@dataclass(frozen=True, eq=False)
class Curve:
    """One quantity of one N at S recorded steps.

    Attributes:
        mean: Mean over the seeds, shape [S].
        spread: Standard deviation over the seeds (with their number minus 1), shape [S]; 0 with one seed.
    """

    mean: FloatArray
    spread: FloatArray


def curves(results: Sequence[SimulationResult], quantity: str) -> dict[int, Curve]:
    """Return the curve of a quantity for each N, N ascending.

    Args:
        results: Simulations that differ only in rollouts and seed.
        quantity: "correct_mass", "fraction_improved" or "worst_drop".

    Raises:
        ValueError: If the simulations differ in another setting.
    """
    _require_one_experiment(results)
    by_rollouts: dict[int, list[FloatArray]] = {}
    for result in results:
        by_rollouts.setdefault(result.settings.rollouts, []).append(getattr(result, quantity))
    return {
        rollouts: Curve(np.mean(values, axis=0), _spread(np.array(values)))
        for rollouts, values in sorted(by_rollouts.items())
    }


def to_json(results: Sequence[SimulationResult]) -> dict[str, Any]:
    """Return the content of `simulation.json`: format, version, the shared settings, and one entry per simulation."""
    _require_one_experiment(results)
    shared = asdict(results[0].settings) | {"weight_decay": results[0].settings.decay}
    del shared["rollouts"], shared["seed"]
    runs = [
        {"rollouts": r.settings.rollouts, "seed": r.settings.seed}
        | {name: getattr(r, name).tolist() for name in ("step", *_QUANTITIES)}
        for r in results
    ]
    return {"format": _FORMAT, "brorl_version": brorl.__version__, "settings": shared, "runs": runs}


def to_csv(results: Sequence[SimulationResult]) -> str:
    """Return the content of `simulation.csv`: a header, and a line for each record of each simulation."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["rollouts", "seed", "step", *_QUANTITIES])
    for result in results:
        columns = [getattr(result, name).tolist() for name in ("step", *_QUANTITIES)]
        for record in zip(*columns, strict=True):
            writer.writerow([result.settings.rollouts, result.settings.seed, *record])
    return text.getvalue()


def draw_figure(results: Sequence[SimulationResult]) -> Figure:
    """Draw correct mass, percentage improved and worst drop over the steps, one line for each N.

    With several seeds a line is their mean, with a band of one standard deviation to each side.

    Source: the layout of BroRL (arXiv 2510.01180), Figure 3.
    """
    figure = Figure(figsize=(13.0, 4.6), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, 3))
    for panel, (quantity, title, label, scale) in zip(panels, _PANELS, strict=True):
        _draw_curves(panel, results[0].step, curves(results, quantity), scale)
        panel.set_title(title, fontsize=12)
        panel.set_xlabel("gradient step")
        panel.set_ylabel(label)
        panel.grid(alpha=0.25)
        panel.margins(x=0.01)
    panels[0].axhline(np.mean([r.correct_mass[0] for r in results]), color="0.4", linestyle=":", linewidth=1.2)
    panels[0].ticklabel_format(axis="y", useOffset=False)
    panels[1].set_ylim(-3.0, 103.0)
    panels[2].ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 8), frameon=False, fontsize=11)
    seeds = sorted({r.settings.seed for r in results})
    over = f"seed {seeds[0]}" if len(seeds) == 1 else f"mean of {len(seeds)} seeds"
    figure.suptitle(f"{settings_line(results[0].settings)}; {over}", fontsize=10, color="0.3")
    return figure


def end_point_table(results: Sequence[SimulationResult]) -> Table:
    """Return the table of start and end for each N; with several seeds, ends have their standard deviation."""
    mass, improved, drop = (curves(results, quantity) for quantity in _QUANTITIES)
    seeds = len({r.settings.seed for r in results})
    over = f" ({seeds} seeds: mean ± standard deviation)" if seeds > 1 else ""
    title = f"Mass of the correct tokens, {results[0].step[-1]:,} steps{over}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("N", "start", "end", "change", "improved, %", "worst drop"):
        table.add_column(column, justify="right", no_wrap=True)
    for rollouts, curve in mass.items():
        table.add_row(
            f"{rollouts:,}",
            f"{curve.mean[0]:.4f}",
            _with_spread(curve, seeds, ".4f", ".0e"),
            f"{curve.mean[-1] - curve.mean[0]:+.4f}",
            _with_spread(improved[rollouts], seeds, ".1f", scale=100.0),
            _with_spread(drop[rollouts], seeds, ".1e", ".0e") if drop[rollouts].mean[-1] else "0",
        )
    return table


def check_output_dir(directory: Path) -> bool:
    """Check, before any work, that the files of a simulation may be written to a directory.

    Returns:
        Whether the directory has an earlier simulation, which `write_simulation` would replace.

    Raises:
        UserError: If it is not a directory or cannot be made, or if it has a file of one of the three names without the
            `simulation.json` of a simulation.
    """
    existing = next(path for path in (directory, *directory.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise UserError(f"output_dir {directory}: {existing} is not a directory; choose another --output-dir")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"output_dir {directory}: may not write to {existing}; choose another --output-dir")
    present = [name for name in (JSON_NAME, CSV_NAME, PNG_NAME) if os.path.lexists(directory / name)]
    if present and not _is_simulation(directory / JSON_NAME):
        raise UserError(
            f"output_dir {directory} has {', '.join(present)} that brorl simulate did not write; "
            "move it away or choose another --output-dir"
        )
    return bool(present)


def write_simulation(results: Sequence[SimulationResult], directory: Path) -> None:
    """Write the three files, and the directory if needed; all are complete before the first gets its name."""
    contents = {
        PNG_NAME: _png(draw_figure(results)),
        CSV_NAME: to_csv(results).encode(),
        JSON_NAME: (json.dumps(to_json(results), allow_nan=False) + "\n").encode(),
    }
    directory.mkdir(parents=True, exist_ok=True)
    partial = {name: directory / f".{name}.partial" for name in contents}
    try:
        for name, content in contents.items():
            partial[name].write_bytes(content)
        for name in reversed(contents):  # the JSON first: it marks the files of a simulation
            partial[name].replace(directory / name)
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)


def _require_one_experiment(results: Sequence[SimulationResult]) -> None:
    if not results:
        raise ValueError("needs at least one simulation")
    first = results[0].settings
    for result in results:
        if replace(result.settings, rollouts=first.rollouts, seed=first.seed) != first:
            raise ValueError(f"simulations must differ only in rollouts and seed: {result.settings} and {first}")


def _spread(value_RS: FloatArray) -> FloatArray:
    return value_RS.std(axis=0, ddof=1) if len(value_RS) > 1 else np.zeros(value_RS.shape[1])


def _draw_curves(panel: Axes, step_S: NDArray[np.int64], lines: dict[int, Curve], scale: float) -> None:
    for index, (rollouts, curve) in enumerate(lines.items()):
        color = colormaps["plasma"](0.85 * index / max(len(lines) - 1, 1))
        mean, spread = scale * curve.mean, scale * curve.spread
        panel.plot(step_S, mean, color=color, linewidth=1.8, label=f"N = {rollouts:,}")
        if spread.any():
            panel.fill_between(step_S, mean - spread, mean + spread, color=color, alpha=0.25, linewidth=0)


def settings_line(settings: SimulationSettings) -> str:
    """Return the main settings of a simulation on one line."""
    return (
        f"{settings.vocabulary_size:,} tokens, {settings.num_correct:,} of them correct; "
        f"{settings.surrogate} surrogate, baseline {settings.baseline}, "
        f"{settings.optimizer} at learning rate {settings.learning_rate:g}"
    )


def _with_spread(curve: Curve, seeds: int, form: str, spread_form: str | None = None, scale: float = 1.0) -> str:
    """Return the end of a curve as text, with its spread if there are several seeds."""
    text = format(scale * curve.mean[-1], form)
    return f"{text} ± {scale * curve.spread[-1]:{spread_form or form}}" if seeds > 1 else text


def _png(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=130, metadata={"Software": None})  # the same numbers, the same bytes
    return content.getvalue()


def _is_simulation(path: Path) -> bool:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("format") == _FORMAT
