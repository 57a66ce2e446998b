"""Figure 3 of BroRL (arXiv 2510.01180): how N draws per step change the correct tokens of one softmax.

    python examples/simulator.py                       # the paper's five N, about 10 seconds on one core
    python examples/simulator.py seeds=0,1,2,3,4       # mean and standard deviation over five seeds
    python examples/simulator.py rollouts=64,256 optimizer=sgd learning_rate=1e4

It prints a table of start and end values and the terms of Theorem 1 at the first step, and writes `simulator.png`. It
accepts every setting in `SimulationSettings`.

Dimensions: C simulations (one per seed), S recorded steps.
"""

import sys
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from ruamel.yaml import YAML

from brorl.theory.simulator import SimulationResult, SimulationSettings, simulate

PAPER_ROLLOUTS = "4,8,16,512,51200"
PANELS = {  # quantity: title, axis label, scale
    "correct_mass": ("Total mass of the correct tokens", "probability", 1.0),
    "fraction_improved": ("Correct tokens above their start", "% of the correct tokens", 100.0),
    "worst_drop": ("Worst drop of a correct token", "change of probability", 1.0),
}
Results = Mapping[int, Sequence[SimulationResult]]  # N -> one simulation per seed


def simulate_all(rollouts: Sequence[int], seeds: Sequence[int], **settings: object) -> Results:
    """Run a simulation for every N and seed."""
    return {
        num_rollouts: [simulate(SimulationSettings(rollouts=num_rollouts, seed=seed, **settings)) for seed in seeds]
        for num_rollouts in sorted(rollouts)
    }


def curve(results: Sequence[SimulationResult], quantity: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and standard deviation over seeds, both of shape [S]; the deviation is 0 for one seed."""
    value_CS = np.array([getattr(result, quantity) for result in results])
    return value_CS.mean(axis=0), value_CS.std(axis=0, ddof=1) if len(value_CS) > 1 else np.zeros(value_CS.shape[1])


def print_ends(results: Results) -> None:
    """Print the start and end values for each N, as mean and standard deviation over seeds."""
    print("       N   start     end            improved, %    worst drop")
    for num_rollouts, of_seeds in results.items():
        (mass_S, mass_sd_S), (improved_S, improved_sd_S), (drop_S, drop_sd_S) = (curve(of_seeds, q) for q in PANELS)
        print(
            f"{num_rollouts:8,}  {mass_S[0]:.4f}  {mass_S[-1]:.4f} ±{mass_sd_S[-1]:.0e}  "
            f"{100 * improved_S[-1]:5.1f} ±{100 * improved_sd_S[-1]:3.1f}   {drop_S[-1]:8.1e} ±{drop_sd_S[-1]:.0e}"
        )


def print_terms(results: Results) -> None:
    """Print the terms that change the correct mass at the first step, for distinct draws without a baseline or moments.

    All terms have a factor of 1/N, so compare their signs.
    """
    print("\n       N   sampled correct  sampled wrong  unsampled  sum")
    for num_rollouts, of_seeds in results.items():
        terms = [result.first_step for result in of_seeds if result.first_step is not None]
        if terms:  # empty if all rewards have the same sign
            parts = [(t.sampled_correct_term, t.sampled_wrong_term, t.unsampled_term, t.total) for t in terms]
            correct, wrong, unsampled, total = np.mean(parts, axis=0)
            print(f"{num_rollouts:8,}  {correct:+15.1e}  {wrong:+13.1e}  {unsampled:+9.1e}  {total:+.1e}")


def draw(results: Results) -> Figure:
    """Draw the three quantities by step, with one line per N and a band of one standard deviation."""
    figure = Figure(figsize=(13.0, 4.6), layout="constrained")
    panels = figure.subplots(1, 3)
    for panel, (quantity, (title, label, scale)) in zip(panels, PANELS.items(), strict=True):
        for index, (num_rollouts, of_seeds) in enumerate(results.items()):
            color = colormaps["plasma"](0.85 * index / max(len(results) - 1, 1))
            step_S, (mean_S, spread_S) = of_seeds[0].step, curve(of_seeds, quantity)
            panel.plot(step_S, scale * mean_S, color=color, linewidth=1.8, label=f"N = {num_rollouts:,}")
            low_S, high_S = scale * (mean_S - spread_S), scale * (mean_S + spread_S)
            panel.fill_between(step_S, low_S, high_S, color=color, alpha=0.25, linewidth=0)
        panel.set(title=title, xlabel="gradient step", ylabel=label)
        panel.grid(alpha=0.25)
        panel.margins(x=0.01)
    panels[2].ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, frameon=False)
    return figure


def main(*arguments: str) -> None:
    """Simulate, print the tables and write the figure; arguments have the form `name=value`."""
    settings = dict(argument.split("=") for argument in arguments)
    rollouts, seeds = (
        [int(number) for number in settings.pop(name, usual).split(",")]
        for name, usual in (("rollouts", PAPER_ROLLOUTS), ("seeds", "0"))
    )
    read = YAML(typ="safe", pure=True).load
    results = simulate_all(rollouts, seeds, **{name: read(value) for name, value in settings.items()})
    print_ends(results)
    print_terms(results)
    draw(results).savefig("simulator.png", dpi=130, metadata={"Software": None})
    print("\nwrote simulator.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
