"""The summary above the charts: tiles for one run, a row of a table for each of several, and notes on every run.

Both ends of a change of a held-out score have the same prompts, so the interval of the change is narrower than those of
the two scores.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from brorl.cost import UNITS, total_cost
from brorl.evaluation.paired import Conclusion, conclusion_of, difference_interval
from brorl.evaluation.pass_at_k import pass_at_k
from brorl.format import Estimate, duration, interval
from brorl.reporting.reasons import why_no_change, why_no_update
from brorl.runs.run_record import Record, RunRecord, number, total
from brorl.runs.stored_rollouts import step_list

HEADINGS = (
    "run", "steps", "prompts x N", "held-out pass@1", "at the largest k", "rollouts", "dropped", "tokens sampled",
    "computed", "time",
)  # fmt: skip
_ENDS = 25  # most steps at either end of the run over which the reward is averaged
_NO_LONGER_ROSE = "its evaluations no longer rose (evaluation.patience)"

Direction = Literal["rose", "fell", "unclear"]
_DIRECTIONS: dict[Conclusion, Direction] = {"B leads": "rose", "A leads": "fell", "no difference shown": "unclear"}


@dataclass(frozen=True)
class Figure:
    """A number of a tile: the number as text, its name, and further lines."""

    value: str
    label: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tile:
    """A tile: its color, its numbers, and a sentence below them, which may be empty."""

    title: str
    tone: Literal["good", "bad", "plain"]
    figures: tuple[Figure, ...]
    text: str = ""


def tiles(run: RunRecord) -> list[Tile]:
    """Return the tiles of a run."""
    return [*_score_tiles(run), _cost_tile(run), *_dropped_tile(run), _progress_tile(run)]


def summary_row(run: RunRecord) -> tuple[str, ...]:
    """Return the cells of a run, in the order of `HEADINGS`."""
    cost, dropped = total_cost(run.records), _dropped(run, "samples")
    return (
        run.name,
        steps_done(run),
        _batch(run),
        _before_after(run, 0),
        _before_after(run, -1),
        f"{cost.samples:,}",
        f"{dropped[0]:,} ({_fraction(*dropped)})" if dropped else "not counted",
        f"{cost.sampled_tokens:,}",
        _fraction(cost.unique_tokens, cost.sampled_tokens),
        duration(cost.seconds),
    )


def notes(run: RunRecord) -> list[str]:
    """Return sentences on unusual events in a run."""
    lines = [f"Sign of collapse at {r['collapse']}" for r in run.records if "collapse" in r]
    for record in run.records:
        if "ended" in record:  # a run with later lines was resumed
            when = "after" if "update" in record else "at"
            resumed = "" if record is run.records[-1] else " and was resumed later"
            lines.append(f"The run ended early {when} step {record['step']}{resumed}: {record['ended']}")
    if resets := [r["step"] for r in run.records if "reference_reset" in r]:
        times = "once" if len(resets) == 1 else f"{len(resets)} times"
        lines.append(f"The reference policy was reset {times}, after {step_list(resets)}.")
    begins = [(r["step"], r["objective"]["begins"]) for r in run.steps if "begins" in r.get("objective", {})]
    lines += [f"From step {step}: {text}." for step, text in begins]
    for what, name in (("timed out", "verifier_timeouts"), ("failed", "verifier_failures")):
        training, evaluating = total(run.steps, "sampling", name), total(run.evaluations, "evaluation", name)
        if training or evaluating:
            lines.append(
                f"{training:,.0f} verifications in training and {evaluating:,.0f} in evaluations {what}. They count as "
                "incorrect."
            )
    if lost := total(run.steps, "sampling", "samples_unverified"):
        reasons: Counter[str] = Counter()
        for record in run.steps:
            reasons.update(record["sampling"].get("unverified_reasons", {}))
        lines.append(
            f"{lost:,.0f} of {total(run.steps, 'sampling', 'samples'):,.0f} rollouts could not be verified because of "
            f"the machine. They were taken out of their groups. Most often: {reasons.most_common(1)[0][0]}."
        )
    if lost := total(run.evaluations, "evaluation", "num_unverified"):
        lines.append(f"{lost:,.0f} responses in evaluations could not be verified because of infrastructure failures.")
    stops = [r for r in run.records if "stopped" in r]
    lines += [f"An infrastructure failure stopped the run at step {r['step']}: {r['stopped']}." for r in stops]
    if retries := total(run.steps, "update", "out_of_memory_retries"):
        lines.append(f"Memory ran out {retries:.0f} times. Smaller passes with the same gradients followed.")
    return lines + _coverage_note(run)


def steps_done(run: RunRecord) -> str:
    """Return the number of steps of a run, and the planned number or the budget."""
    last, planned = (run.updates or run.records[:1])[-1]["step"], run.settings.get("steps")
    limit = run.settings.get("budget.limit")
    if limit not in (None, "null"):
        return f"{last:,}, budget {float(limit):,.6g} {run.settings.get('budget.unit', '').replace('_', ' ')}"
    return f"{last:,}" if planned in (None, str(last)) else f"{last:,} of {planned}"


def best_evaluation(run: RunRecord) -> Record | None:
    """Return the line of the best evaluation of trained weights, by `evaluation.best_k`; the earliest of equal ones.

    A line without an update is an evaluation of the weights of the step before.
    """
    trained = [r for r in run.evaluations if r["step"] - ("update" not in r) > 0 and _best_k(run, r) in _ks(r)]
    return max(trained, key=lambda record: _score(record, _best_k(run, record)).value, default=None)


def score_change(run: RunRecord, k: int) -> tuple[Direction, Estimate | None]:
    """Return how pass@k changed from the first to the last evaluation, and the difference with its 95% interval.

    The interval is over the prompts that were verified at both; without counts of prompts there is none. A score rose
    or fell if this interval excludes 0, or without it, if the intervals of the two scores do not overlap.
    """
    ends = [run.evaluations[index]["evaluation"] for index in (0, -1)]
    prompts = [end.get("prompts") or {} for end in ends]
    correct = [each.get("num_correct") or [] for each in prompts]
    lost = [each["num_unverified"] for each in prompts if "num_unverified" in each]
    kept = [i for i in range(len(correct[0])) if not any(each[i] for each in lost)]
    before, after = (_score(run.evaluations[index], k) for index in (0, -1))
    if len(correct[0]) != len(correct[1]) or not kept:
        bounds = Estimate(after.value - before.value, after.low - before.high, after.high - before.low)
        return _DIRECTIONS[conclusion_of(bounds)], None
    a, b = (pass_at_k([c[i] for i in kept], e["num_samples"], k)[None] for c, e in zip(correct, ends, strict=True))
    difference = difference_interval(a, b, seeds_paired=True)
    return _DIRECTIONS[conclusion_of(difference)], difference


def _best_k(run: RunRecord, record: Record) -> int:
    """Return the k of the pass@k that decides which evaluation is the best."""
    k = run.settings.get("evaluation.best_k", "null")
    return min(_ks(record)) if k == "null" else int(k)


def _ks(record: Record) -> list[int]:
    return list(map(int, record["evaluation"]["pass_at"]))


def _score(record: Record, k: int) -> Estimate:
    """Return pass@k of an evaluation, with its interval."""
    estimate = record["evaluation"]["pass_at"][str(k)]
    return Estimate(*(float(estimate[name]) for name in ("value", "low", "high")))


def _scores(run: RunRecord) -> dict[int, list[Estimate]]:
    """Return each pass@k of the first and of the last evaluation, or of the only one, k ascending."""
    ends = run.evaluations[:1] + run.evaluations[1:][-1:]
    ks = sorted(k for k in _ks(ends[0]) if k in _ks(ends[-1])) if ends else []
    return {k: [_score(record, k) for record in ends] for k in ks}


def _score_tiles(run: RunRecord) -> list[Tile]:
    scores = _scores(run)
    if len(run.evaluations) < 2 or not scores:
        return [_learning_tile(run)]
    figures: dict[Direction, tuple[Figure, ...]] = {"rose": (), "fell": (), "unclear": ()}
    for k, (before, after) in scores.items():
        direction, difference = score_change(run, k)
        figures[direction] += (_change_figure(run, k, before, after, difference),)
    rose, fell, unclear = figures.values()
    made = [
        Tile("Scores that rose", "good" if rose else "plain", rose, "" if rose else "No held-out score clearly rose."),
        Tile("Scores that fell", "bad" if fell else "plain", fell, "" if fell else "No held-out score clearly fell."),
    ]
    return [*made, Tile("No clear change", "plain", unclear)] if unclear else made


def _change_figure(run: RunRecord, k: int, before: Estimate, after: Estimate, difference: Estimate | None) -> Figure:
    first, last = run.evaluations[0], run.evaluations[-1]
    details = [f"95% intervals: {_ends(before)} {_when(first)}, {_ends(after)} {_when(last)}"]
    if difference:
        ends = difference.value, difference.low, difference.high
        rounded = Estimate(*(round(end, 3) + 0.0 for end in ends))  # + 0.0: never -0.000
        details.insert(0, f"change {rounded.value:+.3f} {_ends(rounded, '+')}")
    best = best_evaluation(run)
    if best is not None and best is not last and k == _best_k(run, best):
        details.append(f"best: {_score(best, k).value:.3f} {_when(best)}")
    return Figure(_unbroken(f"{before.value:.3f} → {after.value:.3f}"), f"held-out pass@{k}", tuple(details))


def _learning_tile(run: RunRecord) -> Tile:
    """Return the tile of a run without two evaluations: its scores, or its reward in training."""
    figures = [
        Figure(
            f"{score.value:.3f}", f"held-out pass@{k}", (f"95% interval {_ends(score)} {_when(run.evaluations[0])}",)
        )
        for k, (score,) in _scores(run).items()
    ]
    rewards = [value for r in run.updates if (value := number(r, "sampling", "reward")) is not None]
    if (size := min(_ENDS, len(rewards) // 2)) and not figures:
        steps = "step" if size == 1 else f"{size} steps"
        details = (f"means of the first {steps} and of the last {steps}, which have different prompts",)
        means = _unbroken(f"{fmean(rewards[:size]):.3f} → {fmean(rewards[-size:]):.3f}")
        figures.append(Figure(means, "reward in training", details))
    return Tile("Learning", "plain", tuple(figures), why_no_change(run))


def _cost_tile(run: RunRecord) -> Tile:
    cost = total_cost(run.records)
    evaluating = total(run.evaluations, "evaluation", "seconds")
    verified = total(run.steps, "sampling", "distinct_responses")
    computed = f"{_fraction(cost.unique_tokens, cost.sampled_tokens)} of {cost.sampled_tokens:,} tokens sampled"
    more = (f"evaluations took another {duration(evaluating)}",) if evaluating else ()
    figures = (
        Figure(duration(cost.seconds), "time of the steps", more),
        Figure(f"{cost.samples:,}", "rollouts sampled", (f"{verified:,.0f} distinct responses verified",)),
        Figure(f"{cost.unique_tokens:,}", "tokens computed", (computed,)),
    )
    return Tile("Cost", "plain", figures)


def _dropped_tile(run: RunRecord) -> list[Tile]:
    figures = tuple(
        Figure(f"{dropped[0]:,}", label, (f"{_fraction(*dropped)} of those {verb}",))
        for name, label, verb in (("samples", "rollouts", "sampled"), ("unique_tokens", "tokens computed", "computed"))
        if (dropped := _dropped(run, name))
    )
    text = "Groups that are not mixed give no gradient."
    return [Tile("Dropped by dynamic sampling", "plain", figures, text)] if figures else []


def _progress_tile(run: RunRecord) -> Tile:
    last = run.records[-1]
    if "stopped" in last:
        text = f"An infrastructure failure stopped the run at step {last['step']}: most rollouts could not be verified."
    elif "ended" not in last:
        text = "The metrics end here: the run is not finished, or it was stopped." if _is_unfinished(run) else ""
    elif "update" in last:
        why = "signs of collapse" if last["ended"] == last.get("collapse") else _NO_LONGER_ROSE
        text = f"The run ended early, after step {last['step']}: {why}."
    else:
        why = "" if run.updates else f" {why_no_update(run)}"
        text = f"The run ended early, at step {last['step']}: too few mixed groups.{why}"
    return Tile("Progress", "plain", (Figure(steps_done(run), "steps", (f"prompts x N: {_batch(run)}",)),), text)


def _is_unfinished(run: RunRecord) -> bool:
    """Return whether the settings leave the run more to do."""
    planned, limit, unit = (run.settings.get(name, "null") for name in ("steps", "budget.limit", "budget.unit"))
    done, spent = run.records[-1]["step"], total_cost(run.records)
    left = [done < int(planned)] if planned != "null" else []
    if limit != "null":
        left += [spent.of(name) < float(limit) for name in UNITS if name == unit]
    return bool(left) and all(left)


def _dropped(run: RunRecord, name: str) -> tuple[int, int] | None:
    """Return the amount that dynamic sampling dropped and the whole amount, over the steps whose metrics count it."""
    counting = [r for r in run.steps if number(r, "sampling", f"{name}_dropped") is not None]
    dropped, whole = (int(total(counting, "sampling", key)) for key in (f"{name}_dropped", name))
    return (dropped, whole) if counting else None


def _batch(run: RunRecord) -> str:
    """Return the prompts of a step times the rollouts of a prompt."""
    prompts, rollouts = (run.settings.get(n) for n in ("prompts_per_step", "rollouts_per_prompt"))
    return f"{prompts or '?'} x {rollouts or '?'}"


def _before_after(run: RunRecord, index: int) -> str:
    """Return the score of the smallest (0) or the largest (-1) k at both ends, as text that breaks at the arrow."""
    scores = list(_scores(run).items())
    if not scores:
        return "not evaluated"
    k, ends = scores[index]
    return f"pass@{k}: " * (index != 0) + " → ".join(_unbroken(interval(score)) for score in ends)


def _coverage_note(run: RunRecord) -> list[str]:
    scores = _scores(run)
    k = max(scores, default=1)
    if k == 1 or len(scores[k]) < 2:
        return []
    before, after = scores[k]
    if after.high >= before.low:
        return []
    return [
        f"Coverage fell: held-out pass@{k} went from {before.value:.3f} to {after.value:.3f}, beyond the intervals. "
        "A lower optimizer.learning_rate or fewer steps keep more of it."
    ]


def _fraction(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"  # noqa: RUF001


def _ends(estimate: Estimate, sign: str = "") -> str:
    return _unbroken(f"[{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]")


def _unbroken(text: str) -> str:
    return text.replace(" ", "\u00a0")


def _when(record: Record) -> str:
    return f"after step {record['step']:,}" if record["step"] else "before training"
