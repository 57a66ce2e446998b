"""Reasons why a run has no such numbers, in sentences that hold for this run.

The reasons follow from the settings and from the metrics. If neither explains a gap, the text states the gap alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from brorl.runs.run_record import RunRecord, total

Why = Callable[[RunRecord], str]


def reason(runs: Sequence[RunRecord], why: Why) -> str:
    """Return why no run has a number: one sentence if the reason is the same for all runs, else one for each run."""
    whys = [why(run) for run in runs]
    if len(set(whys)) == 1:
        return whys[0]
    return " ".join(f"{run.name}: {text}" for run, text in zip(runs, whys, strict=True))


def why_no_step(run: RunRecord) -> str:
    """Return why a run has no number of a step."""
    return "The metrics hold no such number." if run.steps else "No step is complete yet."


def why_no_update(run: RunRecord) -> str:
    """Return why no step of a run made an update, or why its updates lack a number."""
    if run.updates or not run.steps:
        return why_no_step(run)
    names = ("groups", "groups_mixed", "groups_all_correct")
    groups, mixed, correct = (int(total(run.steps, "sampling", name)) for name in names)
    if mixed:
        return f"No update was made: only {mixed:,} of {groups:,} groups were mixed (correct and incorrect rollouts)."
    outcome = {0: " No rollout was correct.", groups: " Every rollout was correct."}.get(correct, "") if groups else ""
    return f"No update was made: no group was mixed (correct and incorrect rollouts).{outcome}"


def why_no_held_out_check(run: RunRecord) -> str:
    """Return why no update of a run has a number of the held-out check."""
    setting = "diagnostics.held_out_check_every"
    if not run.updates or any(r.get("held_out_check") for r in run.records):
        return why_no_update(run)
    if run.settings.get(setting) == "0":
        return f"No update was checked ({setting}: 0)."
    due = _not_due(run, setting)
    return f"The first check is due at {due}." if due else "The metrics hold no check of an update."


def why_no_evaluation(run: RunRecord) -> str:
    """Return why a run has no evaluation, or no number of its evaluations."""
    if run.settings.get("evaluation.num_prompts") == "0":
        return "The run made no evaluations (evaluation.num_prompts: 0)."
    return "The evaluations hold no such number." if run.evaluations else "The metrics hold no evaluation."


def why_no_rollouts(run: RunRecord) -> str:
    """Return why a run directory contains no rollouts of training."""
    if run.settings.get("store_rollouts_every") == "0":
        return "No rollouts were stored (store_rollouts_every: 0)."
    if not run.updates:
        return why_no_update(run)
    if due := _not_due(run, "store_rollouts_every"):
        return f"The first rollouts are stored at {due}."
    return f"There are no rollouts in {run.path / 'rollouts'}."


def why_no_held_out_responses(run: RunRecord) -> str:
    """Return why a run directory contains no responses to held-out prompts."""
    if not run.evaluations:
        return why_no_evaluation(run)
    if run.settings.get("store_rollouts_every") == "0":
        return "No responses were stored (store_rollouts_every: 0)."
    return f"There are no responses in {run.path / 'evaluations'}."


def _not_due(run: RunRecord, setting: str) -> str:
    """Return the first step that a setting names and the last step of the run, if the run is not there yet."""
    every, done = run.settings.get(setting, ""), run.updates[-1]["step"]
    return f"step {every} ({setting}), and the run is at step {done}" if every.isdecimal() and done < int(every) else ""
