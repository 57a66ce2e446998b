"""`brorl simulate`: runs the paper's token-level simulator for several N and seeds, and writes a figure and tables."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import brorl
from brorl.console.screen import text_console
from brorl.errors import UserError, option
from brorl.runs import RUNS
from brorl.storage import output_folder, replace_file, storage_errors
from brorl.table import Table
from brorl.theory.simulator import SimulationResult, SimulationSettings
from brorl.theory.simulator import simulate as simulate_one

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def simulate(
    *,
    rollouts: Sequence[int] = (4, 8, 16, 512, 51_200),
    seeds: Sequence[int] = (0,),
    output_dir: str | Path = RUNS / "simulation",
    **settings: Any,
) -> None:
    """Simulate every N with every seed, and print and store the results.

    Args:
        rollouts: Draws per step, N, one simulation each.
        seeds: Seeds, one simulation of each N for each.
        output_dir: Folder for simulation.json and .png; an earlier simulation in it is replaced.
        settings: Settings of the simulator; by default the paper's, and Figure 3's where the paper leaves one open.

    Raises:
        UserError: If a setting does not fit.
    """
    for name, numbers in (("rollouts", rollouts), ("seeds", seeds)):
        if twice := [number for number in numbers if numbers.count(number) > 1]:
            given = ",".join(map(str, numbers))
            raise UserError(f"{option(name)}: {given!r} has {twice[0]} twice; give each number once")
    try:
        experiments = [
            SimulationSettings(rollouts=number, seed=seed, **settings) for number in sorted(rollouts) for seed in seeds
        ]
    except ValueError as error:
        raise UserError(f"{error} (see brorl simulate --help)") from error
    console = text_console()
    first = experiments[0]
    headline = f"{settings_line(first)}, weight decay {first.decay:g}; {first.steps:,} steps"
    with output_folder(Path(output_dir).expanduser()) as folder:
        console.print(f"brorl {brorl.__version__}: {headline}", soft_wrap=True, markup=False)
        results: list[SimulationResult] = []
        for one in experiments:
            started = perf_counter()
            results.append(result := simulate_one(one))
            line = (
                f"N = {one.rollouts:,}, seed {one.seed}: correct mass {result.correct_mass[0]:.4f} -> "
                f"{result.correct_mass[-1]:.4f}, {result.fraction_improved[-1]:.1%} of the correct tokens improved "
                f"({perf_counter() - started:.1f} s, {len(results)} of {len(experiments)})"
            )
            console.print(line, soft_wrap=True, markup=False)
        for table in (end_point_table(results), terms_table(results)):
            if table is not None:
                console.print()
                console.print(table)
        with storage_errors(folder, "rerun the command"):
            write_simulation(results, folder)
    console.print(f"simulation.json and simulation.png are in {folder}", soft_wrap=True, markup=False)


_PANELS = {  # quantity: title, label of the axis, scale
    "correct_mass": ("Total mass of the correct tokens", "probability", 1.0),
    "fraction_improved": ("Correct tokens above their start", "% of the correct tokens", 100.0),
    "worst_drop": ("Worst drop of a correct token", "change of probability", 1.0),
}


class Curve(NamedTuple):
    """One quantity at one N over the S recorded steps."""

    mean: NDArray[np.float64]  # mean over the seeds, shape [S]
    spread: NDArray[np.float64]  # standard deviation over the seeds (divisor seeds - 1), shape [S]; 0 with one seed


def curves(results: Sequence[SimulationResult], quantity: str) -> dict[int, Curve]:
    """Return the curve of a quantity ("correct_mass", "fraction_improved" or "worst_drop") for each N, N ascending."""
    made = {}
    for rollouts in sorted({r.settings.rollouts for r in results}):
        value_RS = np.array([getattr(r, quantity) for r in results if r.settings.rollouts == rollouts])
        spread_S = value_RS.std(axis=0, ddof=1) if len(value_RS) > 1 else np.zeros(value_RS.shape[1])
        made[rollouts] = Curve(value_RS.mean(axis=0), spread_S)
    return made


def to_json(results: Sequence[SimulationResult]) -> dict[str, Any]:
    """Return the content of `simulation.json`: format, version, the shared settings, and one entry per simulation."""
    shared = asdict(results[0].settings) | {"weight_decay": results[0].settings.decay}
    del shared["rollouts"], shared["seed"]
    runs = [
        {"rollouts": r.settings.rollouts, "seed": r.settings.seed}
        | {name: getattr(r, name).tolist() for name in ("step", *_PANELS)}
        | {"first_step": None if r.first_step is None else asdict(r.first_step)}
        for r in results
    ]
    return {"format": "brorl simulation 1", "brorl_version": brorl.__version__, "settings": shared, "runs": runs}


def draw_figure(results: Sequence[SimulationResult]) -> Figure:
    """Draw correct mass, percentage improved and worst drop over the steps, one line for each N.

    With several seeds, a line is their mean, in a band of one standard deviation to each side.

    Source: the layout of BroRL (arXiv 2510.01180), Figure 3.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 4.6), layout="constrained")
    panels = figure.subplots(1, 3)
    for panel, (quantity, (title, label, scale)) in zip(panels, _PANELS.items(), strict=True):
        made = curves(results, quantity)
        for index, (rollouts, curve) in enumerate(made.items()):
            color = colormaps["plasma"](0.85 * index / max(len(made) - 1, 1))
            mean_S, spread_S = scale * curve.mean, scale * curve.spread
            panel.plot(results[0].step, mean_S, color=color, linewidth=1.8, label=f"N = {rollouts:,}")
            if spread_S.any():
                low_S, high_S = mean_S - spread_S, mean_S + spread_S
                panel.fill_between(results[0].step, low_S, high_S, color=color, alpha=0.25, linewidth=0)
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
    """Return the table of start and end for each N, with the standard deviation over several seeds."""
    mass, improved, drop = (curves(results, quantity) for quantity in _PANELS)
    seeds = len({r.settings.seed for r in results})

    def end(curve: Curve, form: str, spread_form: str, scale: float = 1.0) -> str:
        text = format(scale * curve.mean[-1], form)
        return f"{text} ± {scale * curve.spread[-1]:{spread_form}}" if seeds > 1 else text

    rows = tuple(
        (
            f"{rollouts:,}",
            f"{curve.mean[0]:.4f}",
            end(curve, ".4f", ".0e"),
            f"{curve.mean[-1] - curve.mean[0]:+.4f}",
            end(improved[rollouts], ".1f", ".1f", scale=100.0),
            end(drop[rollouts], ".1e", ".0e") if drop[rollouts].mean[-1] else "0",
        )
        for rollouts, curve in mass.items()
    )
    title = f"Mass of the correct tokens, {results[0].step[-1]:,} steps"
    columns = ("N", "start", "end", "change", "improved, %", "worst drop")
    notes = (f"ends over {seeds} seeds: mean ± standard deviation",) if seeds > 1 else ()
    return Table(title, columns, rows, notes, words=frozenset())


def terms_table(results: Sequence[SimulationResult]) -> Table | None:
    """Return the mean terms of Theorem 1 at the first step for each N; None if they are not defined."""
    rows = []
    for rollouts in sorted({r.settings.rollouts for r in results}):
        terms = [r.first_step for r in results if r.settings.rollouts == rollouts and r.first_step is not None]
        if not terms:
            return None
        parts = [(t.sampled_correct_term, t.sampled_wrong_term, t.unsampled_term, t.total) for t in terms]
        unsampled = np.mean([t.u_pos_2 + t.u_neg_2 for t in terms])
        rows.append((f"{rollouts:,}", *(f"{x:+.1e}" for x in np.mean(parts, axis=0)), f"{unsampled:.1e}"))
    return Table(
        "Theorem 1 at the first step: what changes the mass of the correct tokens",
        ("N", "sampled correct", "sampled wrong", "unsampled", "sum", "unsampled p^2"),
        tuple(rows),
        ("for the distinct drawn tokens, without a baseline and moments; each has 1/N in front: compare signs",),
        words=frozenset(),
    )


def write_simulation(results: Sequence[SimulationResult], directory: Path) -> None:
    """Write the figure first, because it takes longest, and then the numbers."""
    picture = io.BytesIO()  # the same numbers give the same bytes
    draw_figure(results).savefig(picture, format="png", dpi=130, metadata={"Software": None})
    replace_file(directory / "simulation.png", picture.getvalue())
    replace_file(directory / "simulation.json", json.dumps(to_json(results), allow_nan=False).encode())


def settings_line(settings: SimulationSettings) -> str:
    """Return the main settings of a simulation on one line."""
    return (
        f"{settings.vocabulary_size:,} tokens, {settings.num_correct:,} of them correct; "
        f"{settings.surrogate} surrogate, baseline {settings.baseline}, "
        f"{settings.optimizer} at learning rate {settings.learning_rate:g}"
    )
