"""The summary of a run: held-out scores and their changes, the cost, notes, and why numbers are missing.

A change in a held-out score is measured on the same prompts, so its interval is narrower than those of the two scores.
The reasons come from the settings and the metrics. If neither explains a gap, the text only mentions the gap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from brorl.cost import UNITS
from brorl.evaluation.evaluator import coverage_note
from brorl.evaluation.paired import Conclusion, conclusion_of, paired_difference
from brorl.evaluation.pass_at_k import pass_at_k
from brorl.format import Estimate, duration, interval, signed
from brorl.reporting.tool_use import failed_calls, total_tool_use
from brorl.runs.run_directory import StoredRun
from brorl.runs.step_record import EvaluationRecord, SamplingRecord, StepRecord, total_cost
from brorl.runs.stored_rollouts import step_list

SCORES = ("score", "first evaluation", "last evaluation", "change", "conclusion", "best evaluation")
COSTS = (
    "steps", "prompts x N", "rollouts", "dropped", "verified", "tokens sampled", "computed", "time", "evaluations",
)  # fmt: skip
TOOLS = ("turns per rollout", "calls", "distinct", "failed", "tokens given")
_NONE = "–"  # noqa: RUF001

Direction = Literal["rose", "fell", "no change shown"]
_DIRECTIONS: dict[Conclusion, Direction] = {
    "B leads": "rose", "A leads": "fell", "no difference shown": "no change shown",
}  # fmt: skip


def score_rows(run: StoredRun) -> list[tuple[str, ...]]:
    """Return the `SCORES` cells for each held-out pass@k of a run."""
    best = best_evaluation(run)
    rows = []
    for k, ends in _scores(run).items():
        at = (run.evaluations[0], run.evaluations[-1])
        cells = [f"{interval(end)} {_when(record)}" for end, record in zip(ends, at, strict=False)]
        change = direction = _NONE
        if len(ends) > 1:
            direction, difference = score_change(run, k)
            change = _NONE if difference is None else signed(difference)
        elsewhere = best is not None and best is not run.evaluations[-1] and k == _best_k(run, best)
        at_best = f"{_pass_at(best)[k].value:.3f} {_when(best)}" if best is not None and elsewhere else _NONE
        rows.append((f"pass@{k}", *cells, *[_NONE] * (2 - len(cells)), change, direction, at_best))
    return rows


def cost_row(run: StoredRun) -> tuple[str, ...]:
    """Return the `COSTS` cells for a run."""
    cost = total_cost(run.records)
    sampled = _sampled(run)
    dropped = sum(step.samples_dropped for step in sampled)
    return (
        steps_done(run),
        _batch(run),
        f"{cost.samples:,}",
        f"{dropped:,} ({_fraction(dropped, cost.samples)})",
        f"{sum(step.distinct_responses for step in sampled):,}",
        f"{cost.sampled_tokens:,}",
        f"{cost.unique_tokens:,} ({_fraction(cost.unique_tokens, cost.sampled_tokens)})",
        duration(cost.seconds),
        duration(sum(evaluation.seconds for evaluation in _evaluations(run))),
    )


def tools_rows(run: StoredRun) -> list[tuple[str, ...]]:
    """Return the `TOOLS` cells for a run; no rows without tools."""
    use = total_tool_use(run.records)
    if use is None:
        return []
    failed = sum(use.failures.values())
    kinds = f"{failed:,} ({_fraction(failed, use.calls)}): {failed_calls(use)}" if failed else "0"
    distinct = f"{use.distinct_calls:,} ({_fraction(use.distinct_calls, use.calls)})"
    return [(f"{use.turns:.2f}", f"{use.calls:,}", distinct, kinds, f"{use.given_tokens:,}")]


def _sampled(run: StoredRun) -> list[SamplingRecord]:
    return [record.sampling for record in run.records if record.sampling]


def _evaluations(run: StoredRun) -> list[EvaluationRecord]:
    return [record.evaluation for record in run.records if record.evaluation]


def run_notes(run: StoredRun) -> list[str]:
    """Return sentences on unusual events in a run."""
    return [*_events(run), *_lost_verdicts(run), *_ends(run), *coverage_note(_evaluations(run))]


def _events(run: StoredRun) -> list[str]:
    """Return notes on signs of collapse, early ends, reference resets, and phase starts."""
    lines = [f"Sign of collapse at {record.collapse}" for record in run.records if record.collapse]
    for record in run.records:
        if record.end_reason is not None:  # if later records follow, the run was resumed
            when = "after" if record.update else "at"
            resumed = "" if record is run.records[-1] else " and was resumed later"
            lines.append(f"The run ended early {when} step {record.step}{resumed}: {record.end_reason}")
    if resets := [record.step for record in run.records if record.reference_reset]:
        times = "once" if len(resets) == 1 else f"{len(resets)} times"
        lines.append(f"The reference policy was reset {times}, after {step_list(resets)}.")
    phases = [(record.step, record.objective) for record in run.steps if record.objective]
    return lines + [f"From step {step}: {phase.begins}." for step, phase in phases if phase.begins]


def _lost_verdicts(run: StoredRun) -> list[str]:
    """Return notes on how many verifications timed out or failed, and how many rollouts have no verdict."""
    lines = []
    sampled = _sampled(run)
    evaluated = _evaluations(run)
    counts = {
        "timed out": [sum(record.verifier_timeouts for record in records) for records in (sampled, evaluated)],
        "failed": [sum(record.verifier_failures for record in records) for records in (sampled, evaluated)],
    }
    for what, (training, evaluating) in counts.items():
        if training or evaluating:
            lines.append(
                f"{training:,} verifications in training and {evaluating:,} in evaluations {what}. They count as "
                "incorrect."
            )
    if lost := sum(step.samples_unverified or 0 for step in sampled):
        reasons: Counter[str] = Counter()
        for step in sampled:
            reasons.update(step.unverified_reasons or {})
        lines.append(
            f"{lost:,} of {sum(step.samples for step in sampled):,} rollouts could not be verified because of "
            f"infrastructure failures. They were removed from their groups. Most often: {reasons.most_common(1)[0][0]}."
        )
    if lost := sum(evaluation.num_unverified or 0 for evaluation in evaluated):
        lines.append(f"{lost:,} responses in evaluations could not be verified because of infrastructure failures.")
    return lines


def _ends(run: StoredRun) -> list[str]:
    """Return notes on infrastructure failures, lost memory, and whether the run is unfinished."""
    stops = [record for record in run.records if record.failure_reason]
    lines = [
        f"An infrastructure failure stopped the run at step {record.step}: {record.failure_reason}." for record in stops
    ]
    if retries := sum(record.update.out_of_memory_retries for record in run.records if record.update):
        lines.append(f"Memory ran out {retries} times. The run continued with smaller passes and the same gradients.")
    last = run.records[-1]
    if last.failure_reason is None and last.end_reason is None and _is_unfinished(run):
        lines.append("The metrics end here: the run is not finished, or it was stopped.")
    return lines


def steps_done(run: StoredRun) -> str:
    """Return a run's number of steps, with the planned number or the budget."""
    last = (run.updates or run.records[:1])[-1].step
    planned = run.settings.get("steps")
    limit = run.settings.get("budget.limit")
    if limit not in (None, "null"):
        return f"{last:,}, budget {float(limit):,.6g} {run.settings.get('budget.unit', '').replace('_', ' ')}"
    return f"{last:,}" if planned in (None, str(last)) else f"{last:,} of {planned}"


def best_evaluation(run: StoredRun) -> StepRecord | None:
    """Return the record of the best evaluation of trained weights by `evaluation.best_k`; the earliest if tied."""
    trained = [r for r in run.evaluations if r.weights_step > 0 and _best_k(run, r) in _pass_at(r)]
    return max(trained, key=lambda record: _pass_at(record)[_best_k(run, record)].value, default=None)


def score_change(run: StoredRun, k: int) -> tuple[Direction, Estimate | None]:
    """Return how pass@k changed from the first to the last evaluation, and the difference with its 95% interval.

    The interval is over the prompts verified in both evaluations; there is none without per-prompt counts. A score rose
    or fell if this interval excludes 0 or, if there is none, if the intervals of the two scores do not overlap.
    """
    evaluations = _evaluations(run)
    ends = evaluations[0], evaluations[-1]
    correct = [end.prompts.num_correct for end in ends]
    lost = [end.prompts.num_unverified for end in ends if end.prompts.num_unverified]
    kept = [i for i in range(len(correct[0])) if not any(lost_P[i] for lost_P in lost)]
    before, after = (end.pass_at[k] for end in ends)
    if len(correct[0]) != len(correct[1]) or not kept:
        bounds = Estimate(after.value - before.value, after.low - before.high, after.high - before.low)
        return _DIRECTIONS[conclusion_of(bounds)], None
    a, b = (pass_at_k([c[i] for i in kept], e.num_samples, k)[None] for c, e in zip(correct, ends, strict=True))
    difference = paired_difference(a, b, seeds_paired=True)
    return _DIRECTIONS[difference.conclusion], difference.difference


def _best_k(run: StoredRun, record: StepRecord) -> int:
    """Return the k of the pass@k that determines the best evaluation."""
    k = run.settings.get("evaluation.best_k", "null")
    return min(_pass_at(record)) if k == "null" else int(k)


def _pass_at(record: StepRecord) -> Mapping[int, Estimate]:
    return record.evaluation.pass_at if record.evaluation else {}


def _scores(run: StoredRun) -> dict[int, list[Estimate]]:
    """Return each pass@k of the first and last evaluations, or of the only one, in order of k."""
    ends = [_pass_at(record) for record in (*run.evaluations[:1], *run.evaluations[1:][-1:])]
    ks = sorted(k for k in ends[0] if k in ends[-1]) if ends else []
    return {k: [pass_at[k] for pass_at in ends] for k in ks}


def _is_unfinished(run: StoredRun) -> bool:
    """Return whether the run has not reached the end defined by its settings."""
    planned, limit, unit = (run.settings.get(name, "null") for name in ("steps", "budget.limit", "budget.unit"))
    done = run.records[-1].step
    spent = total_cost(run.records)
    left = [done < int(planned)] if planned != "null" else []
    if limit != "null":
        left += [spent.of(name) < float(limit) for name in UNITS if name == unit]
    return bool(left) and all(left)


def _batch(run: StoredRun) -> str:
    """Return the prompts per step times the rollouts per prompt."""
    prompts, rollouts = (run.settings.get(n) for n in ("prompts_per_step", "rollouts_per_prompt"))
    return f"{prompts or '?'} x {rollouts or '?'}"


def _fraction(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else _NONE


def _when(record: StepRecord) -> str:
    return f"after step {record.step:,}" if record.step else "before training"


Missing = Literal["step", "update", "check", "evaluation", "rollouts", "evaluations"]
# what a run may lack -> the setting that disables it at 0 or sets how often it occurs
_SWITCHES: Mapping[Missing, str] = {
    "check": "diagnostics.held_out_check_every",
    "evaluation": "evaluation.num_prompts",
    "rollouts": "store_rollouts_every",
    "evaluations": "store_rollouts_every",
}


def missing_reason(runs: Sequence[StoredRun], what: Missing) -> str:
    """Return why no run has the data: one sentence if the reason is the same for all runs, else one per run."""
    whys = [why_missing(run, what) for run in runs]
    if len(set(whys)) == 1:
        return whys[0]
    return " ".join(f"{run.name}: {text}" for run, text in zip(runs, whys, strict=True))


def why_missing(run: StoredRun, what: Missing) -> str:
    """Return why a run lacks data on steps, updates, checks or evaluations, or why a folder has no responses."""
    setting = _SWITCHES.get(what, "")
    every = run.settings.get(setting, "")
    if every == "0":
        return f"The run disabled this ({setting}: 0)."
    if run.steps and not run.updates and what in ("update", "check", "rollouts"):
        return _why_no_update(run)
    if run.updates and what in ("check", "rollouts") and every.isdecimal():
        done = run.updates[-1].step
        if done < int(every):
            return f"The first is due at step {every} ({setting}), and the run is at step {done}."
    if not (run.steps or run.updates or what.startswith("evaluation")):
        return "No step is complete yet."
    if what in ("rollouts", "evaluations"):
        return f"There are no responses in {run.path / what}."
    return "The metrics contain no such number."


def _why_no_update(run: StoredRun) -> str:
    """Return why none of a run's steps made an update."""
    sampled = _sampled(run)
    groups, mixed, correct = (
        sum(counts) for counts in zip(*((s.groups, s.groups_mixed, s.groups_all_correct) for s in sampled), strict=True)
    )
    if mixed:
        return f"No update was made: only {mixed:,} of {groups:,} groups were mixed (correct and incorrect rollouts)."
    outcome = {0: " No rollout was correct.", groups: " Every rollout was correct."}.get(correct, "") if groups else ""
    return f"No update was made: no group was mixed (correct and incorrect rollouts).{outcome}"
