"""The tiles above the charts of one run: what rose, what fell, what it cost, and how far the run came.

In: a run. Out: tiles of text and numbers, no HTML. Each is true of whatever run it is: without an evaluation, with one,
unfinished, ended early, or without a single update.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from brorl.cost import UNITS, total_cost
from brorl.evaluation.pass_at_k import Estimate
from brorl.report.page.summary import batch, dropped, duration, share, spread, steps_done
from brorl.report.reasons import why_no_change, why_no_update
from brorl.report.score_change import ScoreChange, best_evaluation, score_changes, smallest_k_score
from brorl.runs.run_record import Record, RunRecord, number

Tone = Literal["good", "bad", "plain"]
_ENDS = 25  # steps, at most, that the reward at either end of the run is averaged over


@dataclass(frozen=True)
class Figure:
    """A number of a tile.

    Attributes:
        value: The number, as text.
        label: What it is.
        details: What else to know of it, a line each.
    """

    value: str
    label: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tile:
    """A tile.

    Attributes:
        title: What it is about.
        tone: Its colour.
        figures: Its numbers.
        text: What to know besides; may be empty.
    """

    title: str
    tone: Tone
    figures: tuple[Figure, ...]
    text: str = ""


def tiles(run: RunRecord) -> list[Tile]:
    """Return the tiles of a run."""
    return [*_score_tiles(run), _cost_tile(run), *_dropped_tile(run), _progress_tile(run)]


def _score_tiles(run: RunRecord) -> list[Tile]:
    changes = score_changes(run)
    if not changes:
        return [_unchanged_tile(run)]
    rose, fell, unclear = (
        tuple(_change_figure(run, c) for c in changes if c.direction == direction)
        for direction in ("rose", "fell", "unclear")
    )
    made = [
        Tile("What rose", "good" if rose else "plain", rose, "" if rose else "No held-out score clearly rose."),
        Tile("What fell", "bad" if fell else "plain", fell, "" if fell else "No held-out score clearly fell."),
    ]
    return [*made, Tile("No clear change", "plain", unclear)] if unclear else made


def _change_figure(run: RunRecord, change: ScoreChange) -> Figure:
    first, last = run.evaluations[0], run.evaluations[-1]
    details = [f"95% intervals: {_spread(change.before)} {_when(first)}, {_spread(change.after)} {_when(last)}"]
    if change.difference:
        ends = change.difference.value, change.difference.low, change.difference.high
        by, low, high = (f"{round(value, 3) + 0.0:+.3f}" for value in ends)  # + 0.0: never -0.000
        details.insert(0, f"change {by}\u00a0[{low},\u00a0{high}]")
    best = best_evaluation(run)
    if best is not None and best is not last and change.k == min(int(k) for k in best["evaluation"]["pass_at"]):
        details.append(f"best: {smallest_k_score(best):.3f} {_when(best)}")
    value = f"{change.before.value:.3f}\u00a0→\u00a0{change.after.value:.3f}"
    return Figure(value, f"held-out pass@{change.k}", tuple(details))


def _unchanged_tile(run: RunRecord) -> Tile:
    """Return what is known of learning without two evaluations: one score, or the reward in training."""
    figures = [
        Figure(
            f"{score['value']:.3f}",
            f"held-out pass@{k}",
            (f"95% interval {spread(score['low'], score['high'])} {_when(record)}",),
        )
        for record in run.evaluations[-1:]
        for k, score in sorted(record["evaluation"]["pass_at"].items(), key=lambda item: int(item[0]))
    ]
    return Tile("What was learned", "plain", tuple(figures or _reward(run)), why_no_change(run))


def _reward(run: RunRecord) -> list[Figure]:
    rewards = [value for r in run.updates if (value := number(r, "sampling", "reward")) is not None]
    size = min(_ENDS, len(rewards) // 2)
    if not size:
        return []
    first, last = fmean(rewards[:size]), fmean(rewards[-size:])
    steps = "step" if size == 1 else f"{size} steps"
    details = (f"means of the first {steps} and of the last {steps}; they ask different prompts",)
    return [Figure(f"{first:.3f}\u00a0→\u00a0{last:.3f}", "reward in training", details)]


def _cost_tile(run: RunRecord) -> Tile:
    cost = total_cost(run.records)
    evaluating = sum(number(r, "evaluation", "seconds") or 0.0 for r in run.evaluations)
    verified = int(sum(number(r, "sampling", "distinct_responses") or 0 for r in run.steps))
    besides = (f"evaluations took another {duration(evaluating)}",) if evaluating else ()
    computed = f"{share(cost.unique_tokens, cost.sampled_tokens)} of {cost.sampled_tokens:,} tokens sampled"
    figures = (
        Figure(duration(cost.seconds), "time of the steps", besides),
        Figure(f"{cost.samples:,}", "rollouts sampled", (f"{verified:,} distinct responses verified",)),
        Figure(f"{cost.unique_tokens:,}", "tokens computed", (computed,)),
    )
    return Tile("What it cost", "plain", figures)


def _dropped_tile(run: RunRecord) -> list[Tile]:
    lost = dropped(run)
    if lost is None:
        return []
    figures = (
        Figure(f"{lost.samples:,}", "rollouts", (f"{share(lost.samples, lost.all_samples)} of those sampled",)),
        Figure(
            f"{lost.unique_tokens:,}",
            "tokens computed",
            (f"{share(lost.unique_tokens, lost.all_unique_tokens)} of those computed",),
        ),
    )
    text = "Groups in which every rollout had the same outcome teach nothing."
    return [Tile("What dynamic sampling dropped", "plain", figures, text)]


def _progress_tile(run: RunRecord) -> Tile:
    last = run.records[-1]
    if "ended" not in last:
        text = "The metrics end here: the run is still going, or it was stopped." if _is_unfinished(run) else ""
    elif "update" in last:
        text = f"The run ended early, after step {last['step']}: signs of collapse."
    else:
        why = "" if run.updates else f" {why_no_update(run)}"
        text = f"The run ended early, at step {last['step']}: too few groups had both outcomes.{why}"
    return Tile("How far it came", "plain", (Figure(steps_done(run), "steps", (f"prompts x N: {batch(run)}",)),), text)


def _is_unfinished(run: RunRecord) -> bool:
    """Whether a run has more to do, as far as its settings say."""
    planned, limit, unit = (run.settings.get(name, "null") for name in ("steps", "budget.limit", "budget.unit"))
    done, spent = run.records[-1]["step"], total_cost(run.records)
    left = [done < int(planned)] if planned != "null" else []
    if limit != "null":
        left += [spent.of(name) < float(limit) for name in UNITS if name == unit]
    return bool(left) and all(left)


def _spread(score: Estimate) -> str:
    return spread(score.low, score.high)


def _when(record: Record) -> str:
    return f"after step {record['step']:,}" if record["step"] else "before training"
