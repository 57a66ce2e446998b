"""The charts of the page, with their titles and explanations.

In: runs. Out: charts of plotly traces. A chart without numbers gives the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

from brorl.format import counted
from brorl.reporting.page import traces
from brorl.reporting.page.traces import LAST_STEPS, Quantity, Trace, estimate, lines
from brorl.reporting.reasons import (
    Why,
    reason,
    why_no_change,
    why_no_coverage,
    why_no_estimate,
    why_no_evaluation,
    why_no_held_out_check,
    why_no_smaller_n,
    why_no_step,
    why_no_update,
)
from brorl.runs.run_record import RunRecord, number

PHASES = ("generation", "verification", "training", "diagnostics", "storing")
_LOST: dict[str, Quantity] = {"timed out": "sampling.verifier_timeouts", "failed": "sampling.verifier_failures"}


@dataclass(frozen=True)
class Chart:
    """A chart of the page.

    Attributes:
        name: Its id on the page.
        title: Its title.
        explanation: One line on the meaning of the numbers.
        traces: Plotly traces; empty if there are no numbers.
        layout: Plotly layout, without colors.
        empty: The reason if there are no numbers.
        by_progress: Whether x is the course of the run, in a unit that the reader chooses.
        marks: Whether resets of the reference, and where a phase begins, are marked.
    """

    name: str
    title: str
    explanation: str
    traces: tuple[Trace, ...]
    layout: dict[str, Any] = field(default_factory=dict)
    empty: str = ""
    by_progress: bool = True
    marks: bool = False


def learning_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts of rewards and held-out scores."""
    no_evaluation = reason(runs, why_no_evaluation)
    largest_k = max((int(k) for run in runs for r in run.evaluations for k in r["evaluation"]["pass_at"]), default=1)
    source_names = sorted({s for run in runs for r in run.evaluations for s in r["evaluation"].get("by_source") or {}})
    score_charts = [
        Chart(
            name,
            f"Held-out pass@{k}{note}",
            f"Chance that {responses} to a prompt not used in training is correct.",
            lines(runs, {f"pass@{k} with 95% interval": estimate("evaluation", "pass_at", str(k))}),
            _axis(f"pass@{k}", percent=True),
            no_evaluation,
            marks=True,
        )
        for name, k, note, responses in (
            ("pass1", 1, "", "one response"),
            ("coverage", largest_k, " (coverage)", f"at least one of {largest_k} responses"),
        )
        if name == "pass1" or k > 1
    ]
    sources = Chart(
        "sources",
        "Held-out pass@1 by source of prompts",
        "The same chance for the prompts of each data set. Bars are 95% intervals.",
        lines(runs, {source: estimate("evaluation", "by_source", source, "1") for source in source_names}),
        _axis("pass@1", percent=True),
    )
    return [
        Chart(
            "reward",
            "Reward in training",
            "Mean reward of all rollouts of a step. Every step has different prompts, so follow the bold line.",
            traces.smoothed(runs, lines(runs, {"mean reward": "sampling.reward"})),
            _axis("mean reward"),
            reason(runs, why_no_step),
        ),
        *score_charts,
        Chart(
            "passk",
            "Held-out pass@k",
            "Chance that at least one of k responses is correct. Bars are 95% intervals.",
            traces.pass_at_curves(runs),
            _axis("pass@k", percent=True) | _log_axis("k"),
            no_evaluation,
            by_progress=False,
        ),
        Chart(
            "held-out",
            "Each held-out prompt, before and after",
            "Fraction of correct responses at the first and at the last evaluation. Prompts above the line gained.",
            traces.held_out_points(runs),
            {
                axis: {"tickformat": ".0%", "range": [-0.03, 1.03], "title": {"text": f"correct {when}"}}
                for axis, when in (("xaxis", "before"), ("yaxis", "after"))
            }
            | _no_change_line(x0=0, x1=1, y0=0, y1=1),
            reason(runs, why_no_change),
            by_progress=False,
        ),
        *([sources] if sources.traces else []),
    ]


def coverage_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts of the responses that N rollouts per prompt found and missed."""
    groups_axis, n_axis = _axis("fraction of groups", percent=True), _log_axis("rollouts per prompt, N")
    unsampled: dict[str, Quantity] = {
        "new response": "coverage.pooled.unsampled",
        "new correct response": "coverage.pooled.unsampled_correct",
    }
    return [
        Chart(
            "informative",
            "Groups with correct and incorrect rollouts",
            "Fraction of mixed groups in a step, and the fraction that fewer of the same rollouts would have found.",
            traces.mixed_lines(runs),
            groups_axis,
            reason(runs, why_no_step),
        ),
        Chart(
            "informative-n",
            f"The same fraction against N (last {LAST_STEPS} steps)",
            "Fraction of mixed groups if each prompt had N rollouts. Where it is flat, more rollouts add nothing.",
            traces.against_n(runs, "informative_fraction_at", "mixed groups"),
            groups_axis | n_axis,
            reason(runs, why_no_smaller_n),
            by_progress=False,
        ),
        Chart(
            "unsampled",
            "Probability that no rollout sampled",
            "Chance that one more rollout would be a new response, and a new correct one.",
            lines(runs, unsampled),
            _axis("probability", percent=True),
            reason(runs, why_no_coverage),
        ),
        Chart(
            "unsampled-n",
            f"Unsampled correct probability against N (last {LAST_STEPS} steps)",
            "Chance that one more rollout after N would be a new correct response. Beyond the run's N it is forecast.",
            traces.against_n(runs, "unsampled_correct_at", "new correct response"),
            _axis("probability", percent=True) | n_axis,
            reason(runs, why_no_estimate),
            by_progress=False,
        ),
        Chart(
            "held_out_check",
            "Held-out check: effect of one update on correct responses",
            "Change of the chance of a correct response, measured on fresh rollouts. Above 0 the update helped.",
            lines(runs, {"change with 95% interval": _check_keys("change")}),
            _axis("change of probability") | _no_change_line(xref="paper", x0=0, x1=1, y0=0, y1=0),
            reason(runs, why_no_held_out_check),
        ),
        Chart(
            "improved",
            "Held-out check: fraction of correct probability that one update raised",
            "At 100% no correct response became less likely.",
            lines(runs, {"fraction with 95% interval": _check_keys("fraction_improved")}),
            _axis("share", percent=True),
            reason(runs, partial(why_no_held_out_check, name="fraction_improved")),
        ),
    ]


def cost_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts of the cost: sharing, time, dropped rollouts, lengths, failed verifications."""
    line_chart = partial(_line_chart, runs, why_no_step)
    dropped = line_chart(
        "dropped",
        "Rollouts that dynamic sampling dropped",
        "Fraction of a step's rollouts and tokens in groups that were not mixed. The update does not use them.",
        {
            "rollouts": ("sampling.samples_dropped", "sampling.samples"),
            "tokens computed": ("sampling.unique_tokens_dropped", "sampling.unique_tokens"),
        },
        _axis("fraction of the step", percent=True),
    )
    steps, lost = sum(len(run.steps) for run in runs), lines(runs, _LOST)
    return [
        line_chart(
            "sharing",
            "Work saved by sharing",
            "Work done as a fraction of the work for separate rollouts. At 10% the tree does a tenth of it.",
            {
                "tokens computed / sampled": ("sampling.unique_tokens", "sampling.sampled_tokens"),
                "responses verified / rollouts": ("sampling.distinct_responses", "sampling.samples"),
            },
            _axis("share", percent=True),
        ),
        _seconds_chart(runs),
        *([dropped] if dropped.traces else []),  # older metrics do not count dropped rollouts
        line_chart(
            "length",
            "Length of responses",
            "Mean number of tokens of a rollout, the end token included.",
            {"mean length": "sampling.mean_length"},
            _axis("tokens"),
        ),
        line_chart(
            "truncated",
            "Rollouts cut at the token limit",
            "Fraction of rollouts longer than sampling.max_new_tokens. They count as incorrect unless "
            "rewards.stop_properly is set.",
            {"cut rollouts": "sampling.truncation_rate"},
            _axis("fraction of rollouts", percent=True),
        ),
        Chart(
            "lost",
            "Verifications that timed out or failed",
            "They count as incorrect. The rollouts below show the reasons.",
            lost if any(value for trace in lost for value in trace["y"]) else (),
            _axis("distinct responses"),
            f"No verification timed out or failed in {counted(steps, 'step')}." if steps else reason(runs, why_no_step),
        ),
    ]


def optimization_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts of the policy's changes: entropy, KL, clipping, gradients."""
    line_chart = partial(_line_chart, runs, why_no_update)
    charts = [
        line_chart(
            "entropy",
            "Entropy of the policy",
            "Randomness of the sampled tokens. Near 0 all rollouts of a prompt are the same.",
            {"entropy": "update.entropy"},
            _axis("nats per token"),
        ),
        line_chart(
            "kl",
            "Distance from earlier policies",
            "KL divergence over the sampled tokens: from the reference policy, and within each step.",
            {"from the reference": "update.reference_kl", "within the step": "update.old_policy_kl"},
            _axis("nats per token"),
        ),
        line_chart(
            "clip",
            "Signal that clipping removed",
            "Fraction of the advantages whose gradient the loss clipped. If it is large, the steps are too large.",
            {"upper bound": "update.clip_high_fraction", "lower bound": "update.clip_low_fraction"},
            _axis("share", percent=True),
        ),
        line_chart(
            "gradient",
            "Gradient norm",
            "Size of the gradient before optimizer.max_grad_norm limits it. Spikes often come before trouble.",
            {"norm": "update.grad_norm"},
            _axis("norm"),
        ),
    ]
    return [replace(chart, marks=chart.name != "clip") for chart in charts]


def _line_chart(
    runs: Sequence[RunRecord],
    why: Why,
    name: str,
    title: str,
    explanation: str,
    quantities: Mapping[str, Quantity],
    layout: dict[str, Any],
) -> Chart:
    """Return a chart of quantities over the course of the runs."""
    return Chart(name, title, explanation, lines(runs, quantities), layout, reason(runs, why))


def _seconds_chart(runs: Sequence[RunRecord]) -> Chart:
    """Return the seconds of each phase: stacked over the steps of one run, or as means of several runs."""
    layout, of_one = _axis("seconds per step"), len(runs) == 1
    made: list[Trace] = []
    timed = [run for run in runs if run.steps]
    for j, phase in enumerate(PHASES):
        meta = {"color": f"phase:{j}"}
        if of_one:
            records = enumerate(runs[0].records)
            points = [(at, number(r, "seconds", phase) or 0.0) for at, r in records if "sampling" in r]
            if any(value for _, value in points):
                trace = traces.line(runs, 0, phase, 0, points)
                made.append({**trace, "stackgroup": "seconds", "line": {"width": 0.5}, "meta": trace["meta"] | meta})
        elif timed:
            names = [traces.plotly_text(run.name) for run in timed]
            means = [fmean([number(r, "seconds", phase) or 0.0 for r in run.steps]) for run in timed]
            made.append({"type": "bar", "name": phase, "x": names, "y": means, "meta": meta})
    if not of_one:
        layout |= {"barmode": "stack", "xaxis": {"type": "category"}}
    explanation = f"{'S' if of_one else 'Mean s'}econds of a step by phase, without evaluations and checkpoints."
    empty = reason(runs, why_no_step)
    return Chart("seconds", "Time by phase", explanation, tuple(made), layout, empty, by_progress=of_one)


def _check_keys(name: str) -> Quantity:
    """Return where a number of the held-out check and the ends of its interval stand in a line of the metrics."""
    return [("held_out_check", f"{name}{end}") for end in ("", "_low", "_high")]


def _axis(title: str, percent: bool = False) -> dict[str, Any]:
    return {"yaxis": {"title": {"text": title}, "rangemode": "tozero"} | ({"tickformat": ".3~%"} if percent else {})}


def _log_axis(title: str) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": title}, "type": "log", "dtick": 0.30103}}


def _no_change_line(**place: float | str) -> dict[str, Any]:
    return {"shapes": [{"type": "line", "line": {"width": 1}, "name": "no change", "showlegend": True, **place}]}
