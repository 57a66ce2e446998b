"""The answer of `brorl tune`: a sentence, the recipe to train, and a page with the race and the final."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from brorl.comparison.answer import FinishedComparison
from brorl.comparison.arm_recipes import ArmRecipe
from brorl.comparison.findings import Finding, finding, match_of
from brorl.config.reading import dump_yaml, with_settings
from brorl.config.settings import TrainConfig
from brorl.cost import amount
from brorl.format import counted, duration, shell_command, signed
from brorl.reporting.figure import (
    COLORS,
    GREY,
    INK,
    PNG,
    ResultFigure,
    cost_axis,
    draw_curve,
    draw_start,
    label_ends,
    style,
)
from brorl.reporting.frame import AnswerParts, answer_page
from brorl.storage import replace_file, storage_errors
from brorl.table import Result, Table
from brorl.tuning.spec import RUNGS, RungStanding, TuningSpec


def make_race_figure(race: Sequence[Sequence[RungStanding]], start: float, seconds: float, score: str) -> ResultFigure:
    """Make the figure of a race up to `seconds`: one line per arm, with a cross where the arm was dropped."""
    figure = ResultFigure(figsize=(9, 4.6), layout="constrained")
    axis = figure.subplots()
    names = [standing.arm for standing in race[0]]
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    labels = {}
    lowest = start
    for name in names:
        reached = [(fraction, s) for fraction, rung in zip(RUNGS, race, strict=False) for s in rung if s.arm == name]
        points = [(0.0, start), *((seconds * fraction, standing.score) for fraction, standing in reached)]
        end = reached[-1][1]
        draw_curve(axis, *np.array(points).T, color=colors[name], label=name)
        if end.dropped:
            axis.plot(*points[-1], "x", color=colors[name], markersize=11, markeredgewidth=2)
        labels[name] = end.score, f"{name}  {end.score:.3f}{' dropped' if end.dropped else ''}"
        lowest = min(lowest, *(height for _, height in points))
    for fraction in RUNGS[: len(race)]:
        axis.axvline(seconds * fraction, color=GREY, linewidth=0.8, alpha=0.5)
    axis.set_title(fill(f"The race: held-out {score} on the tuning prompts, one seed", 90), color=INK, loc="left")
    style(axis)
    cost_axis(axis, "seconds")
    axis.margins(y=0.1)
    axis.set_ylim(axis.get_ylim())
    draw_start(axis, start, below=start <= lowest, fontsize=8)
    label_ends(axis, axis.get_xlim()[1], labels, colors)
    return figure


NO_RACE = "No answer within {budget}: the first part of the race is not complete; continue with: {command}"
NO_FINAL = (
    "No answer within {budget}: {candidate} was ahead of your recipe in the race, and there was no time to test it on "
    "fresh prompts and seeds; continue with: {command}"
)
NONE_AHEAD = "Keep your recipe: none of {candidates} was ahead of it in pass@{k} after {spent} of training."
NOT_SHOWN = (
    "Keep your recipe: {name} ({candidate}) won the race, but on fresh prompts and seeds it is not shown to end higher "
    "in pass@{k}: {measured}."
)
WON = (
    "With a budget of {budget}: {candidate} ends higher than your recipe ({own}) after {spent} of training each: "
    "{measured}, on fresh prompts, {seeds} each."
)
NOTHING_TO_FIND = (
    "There is hardly anything to gain: held-out pass@{k} is {pass_k} and pass@1 {pass_1}, so more rollouts have no "
    "successes to learn from; choose harder prompts, or a model that sometimes solves more of them."
)


@dataclass(frozen=True, eq=False, repr=False)
class TuningResult(Result):
    """The result of a race, and of the final against the user's recipe."""

    path: Path  # the output folder
    answer: str  # one sentence
    spec: TuningSpec | None  # None if there was nothing to gain
    race: tuple[tuple[RungStanding, ...], ...]  # [rung][arm]
    final: FinishedComparison | None  # the winner against the user's recipe; None if the recipe won the race
    recipe: Path | None = None  # the recipe to train next; None if the user's is the best
    page: Path | None = None  # HTML with the answer, the race and the final; None if there was nothing to gain

    @property
    def train_command(self) -> str | None:
        """The command that trains the recommended recipe."""
        return None if self.recipe is None else shell_command("train", self.recipe)

    def figure(self) -> ResultFigure:
        """Return the figure in `race.png` as a matplotlib figure.

        Raises:
            ValueError: If no rung of the race is complete.
        """
        if self.spec is None or not self.race:
            raise ValueError(f"there is no race to draw: {self.answer}")
        seconds = self.spec.run_seconds
        k = self.spec.k
        return make_race_figure(self.race, self.spec.start[k].value, seconds, f"pass@{k}")

    def parts(self) -> Iterator[Any]:
        """Yield the race, the final, the files, and the answer."""
        if self.spec is not None and self.race:
            yield from (race_table(self.spec, self.race), "")
        if self.page is not None:
            yield f"tables and figures: open {self.page} in a browser"
        if self.train_command:
            yield f"train it: {self.train_command}"
        yield f"\n{self.answer}"

    def __repr__(self) -> str:
        return f"TuningResult({str(self.path)!r}: {self.answer})"


def conclude(
    spec: TuningSpec,
    folder: Path,
    race: tuple[tuple[RungStanding, ...], ...],
    winner: ArmRecipe,
    final: FinishedComparison | None,
    with_more_time: str,
) -> TuningResult:
    """State the answer, write the page, and write the recipe unless it is the user's.

    `race` has the standings at each complete rung. If there is no final, either the user's recipe won, or time ran out
    and the command `with_more_time` resumes the tuning.
    """
    findings = findings_of(spec, race, winner, final, with_more_time)
    won = final is not None and findings[0].template == WON
    recipe = recipe_for(winner.config, final.budget, folder) if won and final else None
    answer = " ".join(map(str, findings))
    result = TuningResult(folder, answer, spec, race, final, recipe, folder / "tune.html" if race else None)
    if result.page is not None:
        _write_page(result, spec, result.page)
    return result


def findings_of(
    spec: TuningSpec,
    race: Sequence[Sequence[RungStanding]],
    winner: ArmRecipe,
    final: FinishedComparison | None,
    with_more_time: str,
) -> list[Finding]:
    """Return the findings, including one if the runs of the final are not matched."""
    pair = None if final is None else final.pair
    candidate = {"name": winner.name, "candidate": winner.title}
    unanswered = {"budget": duration(spec.seconds), "command": with_more_time}
    if not race:
        return [finding(NO_RACE, **unanswered)]
    if winner is spec.own:
        spent = amount(spec.run_seconds * RUNGS[len(race) - 1], "seconds")
        return [finding(NONE_AHEAD, candidates=counted(len(spec.arms) - 1, "candidate"), k=spec.k, spent=spent)]
    if final is None or pair is None:
        return [finding(NO_FINAL, **candidate, **unanswered)]
    measured = ", ".join(
        f"{signed(pair[k].difference)} in pass@{k}" for k in dict.fromkeys((spec.k, 1, max(spec.start)))
    )
    not_matched = [] if final.matched else match_of(final)
    if pair[spec.k].conclusion != "B leads":
        return [finding(NOT_SHOWN, **candidate, k=spec.k, measured=measured), *not_matched]
    answer = finding(
        WON, **candidate, own=spec.own.title, budget=duration(spec.seconds), measured=measured,
        spent=amount(final.budget, "seconds"), seeds=counted(final.fewest_seeds, "seed"),
    )  # fmt: skip
    return [answer, *not_matched]


def recipe_for(config: TrainConfig, run_seconds: float, folder: Path) -> Path:
    """Write a recipe that trains like the runs of the tuning, but in a new run directory."""
    settings: dict[str, Any] = {
        "seed": 0, "steps": None, "output_dir": None, "tracking.run_name": None, "budget.unit": "seconds",
        "budget.limit": run_seconds, "budget.eval_points": [], "budget.pause_at": None,
    }  # fmt: skip
    recipe = folder / "recipe.yaml"
    with storage_errors(folder):
        replace_file(recipe, dump_yaml(with_settings(config, settings, "")).encode())
    return recipe


def _write_page(result: TuningResult, spec: TuningSpec, page: Path) -> None:
    """Write the figure of the race and the page."""
    final = result.final
    figure = result.path / "race.png"
    budget = amount(spec.run_seconds, "seconds")
    tables, files, more = ((), (), ()) if final is None else (final.tables, final.files, final.caveats)
    following = (
        ("to look at the runs of the race", f"{shell_command('report', result.path / 'race')}/*/")
        if result.train_command is None
        else ("to train the winner", result.train_command)
    )
    remark = "The race had one seed and chose among many arms: its scores, on the tuning prompts, prove nothing."
    with storage_errors(result.path):
        result.figure().savefig(figure, **PNG)
        content = AnswerParts(
            "brorl tune",
            f"pass@{spec.k} after {budget} of training",
            [result.answer],
            f"Every run gets {budget} of training on {spec.machine}.",
            [race_table(spec, result.race), *tables],
            [*(file for file in files if file.suffix == ".png"), figure],
            [remark, *more],
            following,
        )
        replace_file(page, answer_page(content).encode())


def race_table(spec: TuningSpec, race: Sequence[Sequence[RungStanding]]) -> Table:
    """Return a table of the arms, those that got farthest first: scores at each rung, and why each was dropped."""
    reached = {arm.name: [s for rung in race for s in rung if s.arm == arm.name] for arm in spec.arms}
    rows = []
    for arm in sorted(
        spec.arms, key=lambda arm: (-len(reached[arm.name]), [-s.score for s in reached[arm.name][::-1]])
    ):
        scores = [f"{standing.score:.3f}" for standing in reached[arm.name]]
        not_reached = ["-"] * (len(RUNGS) - len(scores))
        rows.append((arm.name, arm.title, *scores, *not_reached, reached[arm.name][-1].dropped or ""))
    columns = ("arm", "settings", *(amount(spec.run_seconds * fraction, "seconds") for fraction in RUNGS), "dropped")
    title = f"The race: held-out pass@{spec.k} on the tuning prompts"
    notes = ("-: the arm did not get there.",) if any("-" in row for row in rows) else ()
    return Table(title, columns, tuple(rows), notes, words=frozenset({0, 1, 5}))
