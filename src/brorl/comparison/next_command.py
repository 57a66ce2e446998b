"""The command that follows a comparison, with the reason for it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from brorl.comparison.results import ComparisonResults
from brorl.cost import amount
from brorl.format import exact

_LONGER = 2  # times the budget


@dataclass(frozen=True)
class NextCommand:
    """A command that follows."""

    why: str  # what it is for
    command: str


def next_command(results: ComparisonResults, folder: Path) -> NextCommand:
    """Return the command that follows a comparison.

    A pair without a shown difference needs more seeds, if its prompts are enough for them. All others need a larger
    budget: to be matched, or because a longer run may rank the arms differently.
    """
    comparison = results.comparison
    first_runs = [arm.runs[0].path for arm in comparison.arms]
    recipes = [f"{path}.yaml" for path in first_runs]
    if not all(Path(recipe).is_file() for recipe in recipes):  # an arm is a finished run, which gives the budget
        return NextCommand("to look at the runs", shlex.join(["brorl", "report", *first_runs]))
    seeds = max(len(arm.runs) for arm in comparison.arms)
    unshown = results.pair is not None and results.pair[1].conclusion == "no difference shown"
    needed = next(iter(results.seeds_needed.values()), None)
    if unshown and results.matched and needed and needed.enough_prompts and needed.seeds > seeds:
        return NextCommand(
            f"to show a difference of {needed.half_width:g} in pass@1",
            shlex.join(["brorl", "compare", str(folder), "--seeds", str(needed.seeds)]),
        )
    budget = _LONGER * comparison.budget
    options = ["--match", comparison.unit, "--budget", exact(budget), "--seeds", str(seeds)]
    options += ["--marks", str(len(comparison.eval_points))]
    why = "to see whether this holds for longer" if results.matched else "to match the arms"
    return NextCommand(
        f"{why} ({amount(budget, comparison.unit)} each)", shlex.join(["brorl", "compare", *recipes, *options])
    )
