"""The tables and the figure of the study's second part, from the folders that objectives.py filled.

    python examples/plateau/objective_tables.py runs/plateau --figure docs/figures/study_objectives.png > part2.md

Out: for each task the tries as a Markdown table on stdout, and the verdict's answer with its tables; and a figure of
coverage against pass@1 with an arrow for each arm. What is not there yet is left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from brorl.comparison.arms import Comparison, Measure, scores_at
from brorl.comparison.reading import read_comparison
from brorl.comparison.results import results_of
from brorl.comparison.tables import tables_of
from brorl.cost import cost_of_step
from brorl.evaluation.pass_at_k import FloatArray
from brorl.format import short
from brorl.table import Table

TASKS = {"three": "three numbers", "four": "four numbers", "five": "five numbers"}
OBJECTIVES = {"paper": "the paper's", "maxrl": "MaxRL", "two": "broaden, sharpen"}
COLORS = {16: "#cc7417", 128: "#2e8b6a", 512: "#1f5fa8", 2048: "#142f57"}


def tries_table(task: str, folder: Path) -> Table:
    """Return one row per try: its cost, and pass@k at each of its evaluations."""
    rows, start = [], ""
    for run in sorted(folder.iterdir(), key=lambda run: (int(run.name.split("-")[0][1:]), run.name)):
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        costs = list(accumulate(map(cost_of_step, records)))
        evaluated = [(c, r["evaluation"]["pass_at"]) for c, r in zip(costs, records, strict=True) if "evaluation" in r]
        scores = ["/".join(f"{e['value']:.3f}".lstrip("0") for e in pass_at.values()) for _, pass_at in evaluated]
        if not (run / "complete").exists():
            continue
        end = costs[-1]
        rows.append((run.name, f"{end.seconds:.0f}", str(end.steps), short(end.unique_tokens), *scores[-2:]))
        start = scores[0]
    columns = ("try", "seconds", "steps", "unique tokens", "before the end", "at the end")
    title = f"`{task}` from {folder.name}: pass@1/16/256, one seed; at the start {start}"
    return Table(title, columns, tuple(rows), words=frozenset({0}))


def named(arm: str) -> str:
    """Return the N and the objective of an arm."""
    number, objective = arm.split()
    return f"N = {number}, {OBJECTIVES[objective]}"


def difficulty_table(comparison: Comparison) -> Table:
    """Return pass@16 by the puzzles' pass rate at the start: where each arm gains."""
    n = comparison.num_samples
    start_P = np.mean([run.scores[0].num_correct_P for run in comparison.arms[0].runs], axis=0)
    edges = [0, 0.5, n / 64, n / 16, n / 4, n + 1]  # a mean below half a success counts as none
    columns = ("pass rate at the start", "0", "to 1/64", "to 1/16", "to 1/4", "above")
    cells = [(low <= start_P) & (start_P < high) for low, high in pairwise(edges)]
    rows = [("puzzles", *(str(int(cell.sum())) for cell in cells))]
    measure = Measure(16)
    rows.append(("start", *_means(scores_at(comparison, comparison.arms[0], 0, measure).mean(0), cells)))
    for arm in comparison.arms:
        end_P = scores_at(comparison, arm, comparison.budget, measure).mean(0)
        rows.append((named(arm.name), *_means(end_P, cells)))
    return Table("pass@16 by difficulty at the start", columns, tuple(rows), words=frozenset({0}))


def _means(score_P: FloatArray, cells: list[NDArray[np.bool_]]) -> list[str]:
    return [f"{score_P[cell].mean():.3f}" if cell.any() else "" for cell in cells]


def draw_arms(axis: Axes, comparison: Comparison, title: str) -> None:
    """Draw pass@256 against pass@1: a line per arm from the start through its evaluations, with an arrow at the end."""
    for arm in comparison.arms:
        points = [
            [float(scores_at(comparison, arm, spent, Measure(k)).mean()) for k in (1, comparison.ks[-1])]
            for spent in (0.0, *comparison.eval_points)
        ]
        x, y = np.array(points).T
        color, style = COLORS.get(arm.num_rollouts or 0, "#5b626d"), "--" if "paper" in arm.name else "-"
        axis.plot(x, y, linestyle="none")  # the limits include the end
        axis.plot(x[:-1], y[:-1], style, color=color, marker="o", markersize=3, linewidth=1.8)
        axis.annotate(
            "", (x[-1], y[-1]), (x[-2], y[-2]),
            arrowprops={
                "arrowstyle": "-|>", "color": color, "linewidth": 1.8, "linestyle": style, "shrinkA": 0, "shrinkB": 0
            },
        )  # fmt: skip
        side = -1 if arm.num_rollouts == 512 else 1  # the ends of the large N are close
        axis.annotate(
            named(arm.name), (x[-1], y[-1]), xytext=(6 * side, 5), textcoords="offset points", color=color, fontsize=9,
            ha="left" if side > 0 else "right",
        )  # fmt: skip
        start = x[0], y[0]
    axis.plot(*start, "o", color="black", markersize=8, markerfacecolor="white", zorder=5)
    axis.annotate("start", start, xytext=(-6, -14), textcoords="offset points", fontsize=9)
    axis.set(title=title, xlabel="pass@1", ylabel=f"pass@{comparison.ks[-1]}")
    axis.locator_params(axis="x", nbins=5)
    axis.margins(x=0.3, y=0.1)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#d5d8dd", linewidth=0.6, alpha=0.7)


def tables(root: Path) -> Iterator[str]:
    """Yield the tables of all tasks as Markdown."""
    for task in TASKS:
        for folder in sorted((root / task / "tries").glob("*")):
            yield tries_table(task, folder).markdown()
        if (root / task / "verdict" / "comparison.json").is_file():
            results = results_of(read_comparison(root / task / "verdict"))
            yield f"## {task}"
            yield from (table.markdown() for table in tables_of(results))
            yield difficulty_table(results.comparison).markdown()


def draw(root: Path, path: Path) -> None:
    """Draw the figure."""
    found = {task: root / task / "verdict" for task in TASKS if (root / task / "verdict" / "comparison.json").is_file()}
    figure, axes = plt.subplots(1, len(found), figsize=(5.2 * len(found), 4.6), layout="constrained", squeeze=False)
    for axis, (task, folder) in zip(axes[0], found.items(), strict=True):
        draw_arms(axis, read_comparison(folder), TASKS[task])
    figure.suptitle("Coverage against pass@1, from one start for all arms of a task (arrow: the end)")
    figure.savefig(path, dpi=130, facecolor="white")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    print("\n\n".join(tables(arguments.root)))
    if arguments.figure:
        draw(arguments.root, arguments.figure)
