"""Draw docs/figures/coef.png: how much each estimator weighs a prompt, and where its gradient goes, at two N.

In: nothing. Out: the figure, from the formula of coef(N, p) in docs/explanation/theory.md.

    python scripts/make_coef_figure.py
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter
from scipy.special import expit, logit
from scipy.stats import beta, binom

from brorl.algorithms import advantages

FIGURE = Path(__file__).resolve().parent.parent / "docs" / "figures" / "coef.png"
NUMBERS = (16, 512)
# as many mixed groups as BroRL publishes, at N = 16 and 512: 30% of the prompts are never solved, the others are a Beta
NEVER, BETA = 0.30, beta(0.381, 2.027)
BIN_EDGES = (1 / 512, 1 / 64, 1 / 16, 1 / 4, 3 / 4)  # pass rates between the bins of difficulty
ESTIMATORS = {
    "REINFORCE++": (advantages.reinforce_pp_baseline_weight, "#1f5fa8", "-"),
    "GRPO": (advantages.grpo_weight, "#3a8f5c", "--"),
    "pass@16": (partial(advantages.pass_at_k_weight, k=16), "#8a8f98", "-."),
    "MaxRL": (advantages.maxrl_weight, "#d9822b", "-"),
}
BIN_COLORS = ("#7a1f12", "#c2502b", "#e79c4f", "#f3d9a0", "#b8d3ea", "#6f9fca")  # from the hardest to the easiest


def main() -> None:
    """Draw the figure."""
    figure = Figure(figsize=(11, 8.4), layout="constrained")
    rows = figure.subplots(2, 2, sharey="row", height_ratios=(1.25, 1))
    for column, num_rollouts in enumerate(NUMBERS):
        draw_coefficients(rows[0, column], num_rollouts)
        draw_fractions(rows[1, column], num_rollouts)
    rows[0, 0].set_ylabel("weight of a prompt: coef(N, p)")
    rows[1, 0].set_ylabel("fraction")
    handles, labels = rows[1, 0].get_legend_handles_labels()
    rows[1, 1].legend(
        handles[::-1], labels[::-1], title="pass rate", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5)
    )
    figure.suptitle(
        "More rollouts reach rarer successes only if the estimator weighs them", fontsize=15, fontweight="bold"
    )
    figure.savefig(FIGURE, dpi=130)


def weights(num_rollouts: int) -> dict[str, np.ndarray]:
    """Return w(N, c) of each estimator that has one at this N, shape [N + 1]."""
    found = {}
    for name, (weight, _, _) in ESTIMATORS.items():
        if name == "pass@16" and num_rollouts <= 16:
            continue
        found[name] = np.array([weight(num_rollouts, c) for c in range(num_rollouts + 1)])
    return found


def coefficient(weight_C: np.ndarray, rate_G: np.ndarray) -> np.ndarray:
    """Return coef(N, p) of a weight w(N, c), shape [N + 1], at some pass rates."""
    num_rollouts = weight_C.size - 1
    chance_GC = binom.pmf(np.arange(num_rollouts - 1), num_rollouts - 2, rate_G[:, None])
    return (1 - 1 / num_rollouts) * chance_GC @ weight_C[1:-1]


def draw_coefficients(axis: Axes, num_rollouts: int) -> None:
    """Draw coef(N, p) against p, and its limit 1/p."""
    rate_G = np.geomspace(1e-4, 0.9, 300)
    axis.plot(rate_G, 1 / rate_G, color="#c9ccd1", linewidth=1, zorder=0)
    axis.annotate("1/p, the gradient of log p", (6e-3, 1 / 6e-3), xytext=(6, 2), textcoords="offset points",
                  color="#8a8f98", fontsize=9)  # fmt: skip
    for name, weight_C in weights(num_rollouts).items():
        _, color, style = ESTIMATORS[name]
        coefficient_G = coefficient(weight_C, rate_G)
        axis.plot(rate_G, coefficient_G, style, color=color, linewidth=2.2)
        below = name == "pass@16"
        axis.annotate(name, (rate_G[0], coefficient_G[0]), xytext=(4, -5 if below else 4), color=color, fontsize=10,
                      textcoords="offset points", va="top" if below else "bottom")  # fmt: skip
    axis.axvline(1 / num_rollouts, color="#8a8f98", linewidth=1, linestyle=":")
    axis.annotate("p = 1/N", (1 / num_rollouts, 0.35), xytext=(4, 0), textcoords="offset points", color="#8a8f98",
                  fontsize=9)  # fmt: skip
    axis.set(xscale="log", yscale="log", ylim=(0.3, 1200), xlim=(1e-4, 0.9))
    axis.set_xlabel("pass rate p of the prompt")
    axis.set_title(f"N = {num_rollouts}", fontsize=13)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.spines[["top", "right"]].set_visible(False)


def draw_fractions(axis: Axes, num_rollouts: int) -> None:
    """Draw the fraction of prompts and of each estimator's gradient by difficulty, as stacked bars."""
    edge_E = expit(np.unique(np.concatenate([np.arange(-20, 20.1, 0.2), logit(BIN_EDGES)])))
    rate_G, share_G = (edge_E[1:] + edge_E[:-1]) / 2, (1 - NEVER) * np.diff(BETA.cdf(edge_E))
    amounts = {"prompts*": share_G}
    for name, weight_C in weights(num_rollouts).items():
        amounts[name] = coefficient(weight_C, rate_G) * rate_G * (1 - rate_G) * share_G
    bin_G = np.searchsorted(BIN_EDGES, rate_G)
    bars = {name: np.bincount(bin_G, amount_G) / amount_G.sum() for name, amount_G in amounts.items()}
    slots = ["prompts*", *ESTIMATORS]
    edges = ["0", *(f"1/{1 / e:.0f}" for e in BIN_EDGES[:-1]), "3/4", "1"]
    for index, color in enumerate(BIN_COLORS):
        for slot, name in enumerate(slots):
            if name not in bars:
                continue
            bottom, height = bars[name][:index].sum(), bars[name][index]
            label = f"{edges[index]} to {edges[index + 1]}" if slot == 0 else None
            axis.bar(slot, height, 0.7, bottom, color=color, edgecolor="white", linewidth=0.8, label=label)
            if height >= 0.06:
                ink = "white" if index < 2 else "#222222"
                axis.text(slot, bottom + height / 2, f"{height:.0%}", ha="center", va="center", fontsize=9, color=ink)
    for slot, name in enumerate(slots):
        if name not in bars:
            axis.text(slot, 0.5, "needs\nN > 16", ha="center", va="center", fontsize=10, color="#8a8f98")
    axis.set_xticks(range(len(slots)), slots, fontsize=9)
    axis.set_xlim(-0.6, len(slots) - 0.4)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.set_title(f"Where the gradient goes at N = {num_rollouts}", fontsize=11)
    if num_rollouts == NUMBERS[0]:
        axis.set_xlabel("* those with 0 < p < 1; REINFORCE++ is its baseline variant", fontsize=9, loc="left")
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
