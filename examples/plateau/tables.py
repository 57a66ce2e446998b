"""The tables of the study, as Markdown on stdout.

    python examples/plateau/tables.py runs/plateau/three > three.md

In: the folder that study.sh filled for one task; what is not there yet is left out. Out: the sweep over settings of
N = 16, its way to the plateau, the learning rates tried for every N, and from each switch point what every N spent and
scored, its difference from N = 16 at equal cost, the puzzles gained and lost, and the coverage left at equal pass@1.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from brorl.comparison.arms import Arm, Comparison, Measure, scores_at
from brorl.comparison.matching import costs_at, training_efficiency
from brorl.comparison.paired import difference_interval, mean_over_runs
from brorl.comparison.reading import read_comparison
from brorl.comparison.results import results_of
from brorl.comparison.tables import against_first_table, coverage_table, equal_score_table
from brorl.format import interval, short, signed
from brorl.runs.run_directory import Record, RunDirectory
from brorl.table import Table

RATE = "optimizer.learning_rate"
SETTINGS = {
    RATE: "learning rate",
    "optimizer.mini_batches": "mini-batches",
    "kl.coefficient": "KL",
    "reference.reset_every": "reset every",
    "sampling.temperature": "temperature",
}


def tuning_table(comparison: Comparison) -> Table:
    """What eight settings of N = 16 came to with the same samples."""
    rows = tuple(
        (
            *(arm.differs.get(key, "") for key in SETTINGS),
            *(f"{scores_at(comparison, arm, comparison.budget, Measure(k)).mean():.3f}" for k in comparison.ks),
            mixed_groups(arm),
        )
        for arm in comparison.arms
    )
    columns = (*SETTINGS.values(), *(f"pass@{k}" for k in comparison.ks), "mixed groups")
    return Table(f"N = 16 after {short(comparison.budget)} samples, one seed", columns, rows, words=frozenset())


def mixed_groups(arm: Arm) -> str:
    """Fraction of the groups of all runs that had correct and incorrect rollouts."""
    fraction = training_efficiency(arm)["mixed_fraction"]
    return "-" if fraction is None else f"{fraction.mean:.0%}"


def way_table(arm: Arm) -> Table:
    """How a run of N = 16 came to its plateau: a row an evaluation, groups and rewards of the steps before it."""
    rows: list[tuple[str, ...]] = []
    window: list[Record] = []
    samples = 0
    for record in RunDirectory(Path(arm.runs[0].path)).read_metrics():
        if "sampling" in record:
            window.append(record["sampling"])
            samples += record["sampling"]["samples"]
        if "evaluation" in record:
            scores = (f"{value['value']:.3f}" for value in record["evaluation"]["pass_at"].values())
            rows.append((str(record["step"]), short(samples), *scores, *fractions(window)))
            window = []
    columns = (
        "step",
        "samples",
        "pass@1",
        "pass@16",
        "pass@256",
        "mixed groups",
        "all correct",
        "correct in training",
    )
    return Table(
        f"N = 16 on the way to its plateau, {arm.title or arm.name}, one seed", columns, tuple(rows), words=frozenset()
    )


def fractions(window: list[Record]) -> tuple[str, str, str]:
    """Fractions of the groups that were mixed, of those with only correct rollouts, and of correct rollouts."""
    if not window:
        return "", "", ""
    groups, drawn = (sum(s[key] for s in window) for key in ("groups", "samples"))
    mixed, solved = (sum(s[key] for s in window) / groups for key in ("groups_mixed", "groups_all_correct"))
    correct = sum(s["accuracy"] * s["samples"] for s in window) / drawn
    return f"{mixed:.0%}", f"{solved:.0%}", f"{correct:.3f}"


def rates_table(point: Path) -> Table:
    """What each learning rate came to for each N."""
    folders = sorted(point.glob("rate-N*"), key=lambda folder: int(folder.name.removeprefix("rate-N")))
    found = [read_comparison(folder) for folder in folders]
    rows = []
    for comparison in found:
        scores = [f"{scores_at(comparison, arm, comparison.budget).mean():.3f}" for arm in comparison.arms]
        rows.append((str(comparison.arms[0].num_rollouts), *(f"**{s}**" if s == max(scores) else s for s in scores)))
    title = f"From the {point.name}: pass@1 after {found[0].budget:.0f} seconds with each learning rate, one seed"
    return Table(title, ("N", *(arm.differs[RATE] for arm in found[0].arms)), tuple(rows), words=frozenset())


def costs_table(comparison: Comparison, point: str) -> Table:
    """What every N spent, saw and scored."""
    columns = (
        "N", "prompts", "rate", "steps", "samples", "unique tokens", "sampled per unique", "samples/s", "mixed groups",
        "correct in training", "pass@1 since the switch", *(f"pass@{k}" for k in comparison.ks),
    )  # fmt: skip
    start = (scores_at(comparison, comparison.arms[0], 0, Measure(k)).mean() for k in comparison.ks)
    rows = [("start", *[""] * 10, *(f"{value:.3f}" for value in start))]
    for arm in comparison.arms:
        costs, use = costs_at(arm, comparison.unit, comparison.budget), training_efficiency(arm)
        rates = [rate.mean for rate in (use["tokens_per_unique"], use["samples_per_s"]) if rate is not None]
        scores = (mean_over_runs(scores_at(comparison, arm, comparison.budget, Measure(k))) for k in comparison.ks)
        ends = (scores_at(comparison, arm, spent) for spent in (0, comparison.budget))
        rise = difference_interval(*ends, seeds_paired=True)
        rows.append((
            str(arm.num_rollouts), str(arm.prompts_per_step), arm.differs.get(RATE, "as N = 16"),
            *(short(costs[name].mean) for name in ("steps", "samples", "unique_tokens")), *map(short, rates),
            mixed_groups(arm), training_success(arm), signed(rise), *map(interval, scores),
        ))  # fmt: skip
    title = f"From the {point}, {comparison.budget:.0f} seconds, {len(comparison.arms[0].runs)} seeds"
    return Table(title, columns, tuple(rows), words=frozenset())


def training_success(arm: Arm) -> str:
    """Fraction of correct rollouts on training prompts, before any group is dropped, in the last tenth of the steps."""
    correct = drawn = 0.0
    for run in arm.runs:
        steps = [r["sampling"] for r in RunDirectory(Path(run.path)).read_metrics() if "sampling" in r]
        for sampling in steps[-max(1, len(steps) // 10) :]:
            correct += sampling["accuracy"] * sampling["samples"]
            drawn += sampling["samples"]
    return f"{correct / drawn:.3f}"


def tables_of(folder: Path) -> Iterator[Table]:
    """All tables for which there are results."""
    if (folder / "tune" / "comparison.json").is_file():
        yield tuning_table(read_comparison(folder / "tune"))
    if (folder / "n16" / "comparison.json").is_file():
        yield from map(way_table, read_comparison(folder / "n16").arms)
    for point in ("knee", "plateau"):
        if any((folder / point).glob("rate-N*/comparison.json")):
            yield rates_table(folder / point)
        if (folder / point / "compare" / "comparison.json").is_file():
            comparison = read_comparison(folder / point / "compare")
            results = results_of(comparison)
            yield from (costs_table(comparison, point), against_first_table(results), coverage_table(results))
            if results.equal_score is not None:
                yield equal_score_table(results)


if __name__ == "__main__":
    print("\n\n".join(table.markdown() for table in tables_of(Path(sys.argv[1]))))
